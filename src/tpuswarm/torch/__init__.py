"""Export PyTorch modules and train them with JAX, on hosts without torch."""

from tpuswarm.torch.ops import op
from tpuswarm.torch.recipe import recipe, save, state_dict

__all__ = ["op", "recipe", "save", "state_dict"]
