"""Export PyTorch modules and train them with JAX, on hosts without torch.

Half of the room is `ops/`: some 300 operators of ATen, each with torch's values at ties, bounds and extremes.
"""

from tpuswarm.torch.ops import op
from tpuswarm.torch.recipe import recipe, save, state_dict

__all__ = ["op", "recipe", "save", "state_dict"]
