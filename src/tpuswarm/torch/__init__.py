"""PyTorch modules: exported where torch is, trained by JAX where it is not."""

from tpuswarm.torch.ops import op
from tpuswarm.torch.recipe import recipe, save, state_dict

__all__ = ["op", "recipe", "save", "state_dict"]
