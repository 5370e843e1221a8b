"""Llama 3's scaling (Grattafiori et al. 2024, arXiv 2407.21783; Hugging Face's `llama3`).

Wavelengths longer than L / low_freq_factor are interpolated by s, those shorter than L / high_freq_factor stay, and
between them a ramp over L / wavelength. That ratio is the number of rotations: this is NTK-by-parts under another name.
"""

from conf.errors import check
from model.scaling import ContextChange, TrainedContext, ntk_by_parts


def scale(
    trained: TrainedContext, n: int, factor: float, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0
) -> ContextChange:
    right = f"greater than low_freq_factor={low_freq_factor}, and that at least 0"
    check(high_freq_factor > low_freq_factor >= 0, "scaling.high_freq_factor", high_freq_factor, right)
    return ntk_by_parts.scale(trained, n, factor, alpha=low_freq_factor, beta=high_freq_factor)
