"""Published claims about extrapolation, tested by claims.py. Add new ones at the end: their numbers are quoted.

Lengths are in trained contexts: 2 * L is twice the context that the rows' models were trained at.
"""

import math

from studies.checks import Claim, L, decays_less, no_worse, rises_less, shift_changes, shift_changes_nothing, worse
from studies.rows import BAR

CLAIMS = [
    Claim(
        "Learned embeddings do not extrapolate",
        "Press et al., 2108.12409; Vaswani et al., 1706.03762",
        "positions past the table are undefined (nearly by construction: rows that were not trained are noise)",
        [worse("learned", "none", 2 * L, "learned", "none", L)],
    ),
    Claim(
        "Sinusoidal embeddings do not extrapolate",
        "Press et al., 2108.12409",
        "perplexity rises from 19.91 @532 to 406 @15512 for L=512",
        [worse("sinusoidal", "none", 2 * L, "sinusoidal", "none", L)],
    ),
    Claim(
        "RoPE's perplexity rises steeply past the trained context (it at least doubles at 2 L)",
        "Chen et al., 2306.15595, table 1",
        "perplexity rises from 7.2 to above 1000 at 2 L (7B)",
        [worse("rope", "none", 2 * L, "rope", "none", L, math.log(2))],
    ),
    Claim(
        "ALiBi extrapolates: it is no worse at 16 L than at L",
        "Press et al., 2108.12409",
        "perplexity 18.40 at 3072 of a model trained at 512",
        [no_worse("alibi", "none", 16 * L, "alibi", "none", L)],
    ),
    Claim(
        "ALiBi gains nothing from context past L",
        "Press et al., 2108.12409, B.2",
        "might not be using contexts longer than the ones it was trained on",
        [no_worse("alibi", "none", L, "alibi", "none", n) for n in (4 * L, 16 * L)],
    ),
    Claim(
        "The extrapolation of NoPE is limited",
        "Wang et al., 2404.12224",
        "it still has a limited context length",
        [worse("none", "none", 4 * L, "none", "none", L)],
    ),
    Claim(
        "T5's bias extrapolates better than RoPE: its loss rises less from that at L",
        "Press et al., 2108.12409",
        "it extrapolates better than sinusoidal and rotary embeddings",
        rises_less("t5_bias", "rope", (2 * L, 8 * L)),
    ),
    Claim(
        "xPos extrapolates better than RoPE",
        "Sun et al., 2212.10554",
        "lower perplexity at 2 L and 4 L",
        [worse("rope", "none", n, "xpos", "none", n) for n in (2 * L, 4 * L)],
    ),
    Claim(
        "Interleaved and split RoPE are the same encoding",
        "Su et al., 2104.09864",
        "they differ by a permutation of dimensions",
        [
            no_worse("rope_interleaved", "none", L, "rope", "none", L),
            no_worse("rope", "none", L, "rope_interleaved", "none", L),
        ],
        by_construction=True,
    ),
    Claim(
        "PI without fine-tuning is worse than the better control",
        "Chen et al., 2306.15595, table 3",
        "perplexity 16.1 at 4 L at step 0, against 7.2 within L",
        [worse("rope", "pi", 4 * L, "rope", BAR, 4 * L)],
    ),
    Claim(
        "PI without fine-tuning is better than no scaling at 4 L",
        "Chen et al., 2306.15595, table 3",
        "perplexity 16.1 against more than 1000 (7B)",
        [worse("rope", "none", 4 * L, "rope", "pi", 4 * L)],
    ),
    Claim(
        "PI without fine-tuning is worse than no scaling at 8 L",
        "Su, kexue.fm/9675",
        "13.5 % against 23.2 % of tokens predicted correctly (100M)",
        [worse("rope", "pi", 8 * L, "rope", "none", 8 * L)],
    ),
    Claim(
        "PI with a fixed factor reduces the resolution within L, so the loss there is higher",
        "bloc97; llama.cpp#1967",
        "perplexity rises from 5.91 to 7.00 at 512 tokens",
        [worse("rope", "pi factor=fixed", L, "rope", "none", L)],
    ),
    Claim(
        "NTK-aware scaling without fine-tuning is better than no scaling and than PI",
        "bloc97; kexue.fm/9675",
        "39.3 % of tokens predicted correctly, against 23.2 and 13.5, at 8 L",
        [worse("rope", x, n, "rope", "ntk", n) for x in ("none", "pi") for n in (2 * L, 8 * L)],
    ),
    Claim(
        "NTK-aware scaling without fine-tuning is no worse at 2 L than no scaling at L",
        "bloc97",
        "minimal perplexity degradation",
        [no_worse("rope", "ntk", 2 * L, "rope", "none", L)],
    ),
    Claim(
        "NTK-aware scaling with a fixed factor increases the loss within L",
        "rerope's README",
        "loss within L rises from 1.497 to 1.608 (13B)",
        [worse("rope", "ntk factor=fixed", L, "rope", "none", L)],
    ),
    Claim(
        "NTK-by-parts is better than NTK-aware scaling",
        "Peng et al., 2309.00071, 3.2",
        "it was designed as an improvement of NTK-aware scaling",
        [worse("rope", "ntk", n, "rope", "ntk_by_parts", n) for n in (2 * L, 4 * L)],
    ),
    Claim(
        "NTK-mixed (b = 0.75) is better than NTK-aware scaling",
        "Su, kexue.fm/9706",
        "40.1 % against 39.3 % of tokens predicted correctly, at 8 L, with b = 0.625; the published patch has our 0.75",
        [worse("rope", "ntk", 8 * L, "rope", "ntk_mixed", 8 * L)],
    ),
    Claim(
        "ReRoPE with log-n is better than NTK-aware scaling and NTK-mixed",
        "Su, kexue.fm/9708",
        "48.9 % of tokens predicted correctly, against 39.3 and 40.1 (b = 0.625), at 8 L",
        [worse("rope", x, 8 * L, "rope", "rerope + logn", 8 * L) for x in ("ntk", "ntk_mixed")],
    ),
    Claim(
        "ReRoPE with log-n gains from context past L",
        "bojone/rerope, whose code includes log-n",
        "loss 1.500, 1.427, 1.400 at L, 2 L, 4 L (13B)",
        [worse("rope", "none", L, "rope", "rerope + logn", n) for n in (2 * L, 4 * L)],
    ),
    Claim(
        "Log-n scaling at test time reduces the loss, without another method and in addition to ReRoPE",
        "Su, kexue.fm/8823; kexue.fm/9708",
        "48.9 against 48.5 % of tokens predicted correctly, at 8 L",
        [
            worse("rope", "none", 8 * L, "rope", "logn", 8 * L),
            worse("rope", "rerope", 8 * L, "rope", "rerope + logn", 8 * L),
        ],
    ),
    Claim(
        "YaRN's temperature reduces the loss compared with NTK-by-parts alone",
        "Peng et al., 2309.00071, 3.4",
        "at all lengths from 2 to 64 k",
        [worse("rope", "ntk_by_parts", n, "rope", "yarn_paper", n) for n in (4 * L, 8 * L)],
    ),
    Claim(
        "Dynamic YaRN is better than dynamic PI, and dynamic PI is better than no scaling",
        "Peng et al., 2309.00071, B.3",
        "for Llama 2 without fine-tuning",
        [worse("rope", "pi", 4 * L, "rope", "yarn", 4 * L), worse("rope", "none", 4 * L, "rope", "pi", 4 * L)],
    ),
    Claim(
        "YaRN without fine-tuning is better than PI at 8 L",
        "llama.cpp#2268",
        "perplexity 86 against 117",
        [worse("rope", "pi", 8 * L, "rope", "yarn", 8 * L)],
    ),
    Claim(
        "YaRN without fine-tuning is better than the better control at 2 L",
        "this project",
        "the criterion for the use of context past L",
        [worse("rope", BAR, 2 * L, "rope", "yarn", 2 * L)],
    ),
    Claim(
        "Fine-tuning reduces the loss of PI at 4 L: after 200 steps it is lower than without fine-tuning",
        "Chen et al., 2306.15595, table 3",
        "perplexity falls from 16.10 to 7.12 in 200 steps (nearly by construction: training reduces the loss)",
        [worse("rope", "pi", 4 * L, "pi-200", "none", 4 * L)],
    ),
    Claim(
        "Fine-tuning with PI is better than direct fine-tuning at the fine-tuning context",
        "Chen et al., 2306.15595, table 1",
        "perplexity 6.96 against 7.34, with a fine-tuning context of 2 L; ours is 4 L",
        [worse("none-200", "none", 4 * L, "pi-200", "none", 4 * L)],
    ),
    Claim(
        "Fine-tuning with YaRN or PI is better than with NTK-aware scaling at the fine-tuning context",
        "Peng et al., 2309.00071, table 1",
        "perplexity 3.35 and 3.34 against 3.59 at 8k",
        [worse("ntk-200", "none", 4 * L, f"{x}-200", "none", 4 * L) for x in ("yarn", "pi")],
    ),
    Claim(
        "At 1.25 times the fine-tuning context, YaRN and NTK-aware scaling are better than PI",
        "Peng et al., 2309.00071, table 1",
        "perplexity 6.04 and 6.24 against 8.07 at 10k, fine-tuned at 8k",
        [worse("pi-200", "none", 5 * L, f"{x}-200", "none", 5 * L) for x in ("yarn", "ntk")],
    ),
    Claim(
        "At 1.25 times the fine-tuning context, YaRN is better than NTK-aware scaling",
        "Peng et al., 2309.00071, table 1",
        "perplexity 6.04 against 6.24 at 10k, fine-tuned at 8k",
        [worse("ntk-200", "none", 5 * L, "yarn-200", "none", 5 * L)],
    ),
    Claim(
        "A smaller base in pre-training increases the loss within L and does not extrapolate",
        "Su, kexue.fm/9948",
        "stated without numbers",
        [worse("base500", "none", L, "rope", "none", L), worse("base500", "none", 4 * L, "base500", "none", L)],
    ),
    Claim(
        "A larger base weakens the decay of q . k with distance",
        "Su et al., 2104.09864, 3.4.3; the published decay study",
        "shown in figures, for bases from 500 to 50000",
        [decays_less(5000, than=500), decays_less(50000, than=5000)],
        by_construction=True,
    ),
    Claim(
        "A smaller base extrapolates further past L than a larger one",
        "OpenLMLab/scaling-rope",
        "with base 500 the perplexity is 51.3, with base 1e6 8350, at 1M, fine-tuned at 16k; ours are pre-trained",
        [worse("base1000000", "none", 8 * L, "base500", "none", 8 * L)],
    ),
    Claim(
        "A larger base reduces short-range resolution, so the loss within L is higher",
        "Chen et al., the PI paper, and blog posts",
        "stated without numbers",
        [worse("base1000000", "none", L, "rope", "none", L)],
    ),
    Claim(
        "A base below the lower bound for L (1412 at 256) does not increase the loss within L",
        "Men et al., 2405.14591",
        "below the bound perplexity stays low, while retrieval fails, which these rows do not test",
        [no_worse(base, "none", L, "rope", "none", L) for base in ("base100", "base500")],
    ),
    Claim(
        "Absolute encodings are not shift-invariant",
        "Su et al., 2104.09864; Press et al., 2108.12409",
        "by the definition of the encodings",
        [shift_changes(pos) for pos in ("learned", "sinusoidal")],
        by_construction=True,
    ),
    Claim(
        "RoPE is shift-invariant",
        "Su et al., 2104.09864, 3.2",
        "by the definition of the encoding",
        [shift_changes_nothing("rope")],
        by_construction=True,
    ),
    Claim(
        "Dynamic NTK-aware scaling does not increase the loss within L",
        "emozilla",
        "by the definition: the factor is 1 up to L",
        [no_worse("rope", "dynamic_ntk", L, "rope", "none", L)],
        by_construction=True,
    ),
    Claim(
        "RoPE's loss rises soon past the trained context: it is higher at 1.125 L and 1.25 L than at L",
        "this project",
        "the first study measured nothing between L and 2 L",
        [worse("rope", "none", n, "rope", "none", L) for n in (1.125 * L, 1.25 * L)],
    ),
    Claim(
        "At twice the fine-tuning context, YaRN and NTK-aware scaling are better than PI",
        "this project",
        "claim 29, further past the fine-tuning context than its source",
        [worse("pi-200", "none", 8 * L, f"{x}-200", "none", 8 * L) for x in ("yarn", "ntk")],
    ),
    Claim(
        "At twice the fine-tuning context, YaRN is better than NTK-aware scaling",
        "this project",
        "claim 30, further past the fine-tuning context than its source",
        [worse("ntk-200", "none", 8 * L, "yarn-200", "none", 8 * L)],
    ),
]
