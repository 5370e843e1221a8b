"""Llama 3's scaling (Grattafiori et al. 2024, arXiv 2407.21783; Hugging Face's `llama3`).

Wavelengths longer than L / low_freq_factor are interpolated by s, those shorter than L / high_freq_factor stay, and
between them a ramp over L / wavelength. That ratio is the number of rotations: this is NTK-by-parts under another name.
"""

from conf.errors import UserError
from model.scaling import ContextChange, TrainedContext, ntk_by_parts
from model.thresholds import warning  # noqa: F401 (called by model/scaling/__init__.py)


def scale(
    trained: TrainedContext, n: int, factor: float, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0
) -> ContextChange:
    if not high_freq_factor > low_freq_factor >= 0:
        raise UserError(
            f"scaling.high_freq_factor={high_freq_factor}: must be greater than low_freq_factor={low_freq_factor}, "
            "and that at least 0"
        )
    return ntk_by_parts.scale(trained, n, factor, alpha=low_freq_factor, beta=high_freq_factor)
