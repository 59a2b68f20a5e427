"""The sizes of StyleGAN2."""

from dataclasses import dataclass

MIN_RESOLUTION = 4
"""Resolution of the generator's first block and of the discriminator's last."""


@dataclass(frozen=True)
class Config:
    """Shape of one StyleGAN2. Source: Karras et al. 2020 (1912.04958), figure 2 and appendix B.

    - latent: D, width of z and of w; mapping: layers of the mapping network.
    - channels: C at the full resolution; each halving of the resolution doubles it, up to most_channels.
    - group: G, pictures over which minibatch deviation is taken.
    """

    resolution: int
    latent: int
    mapping: int
    channels: int
    most_channels: int
    group: int

    @property
    def resolutions(self) -> tuple[int, ...]:
        """4, 8, … up to the picture's own."""
        return tuple(2**power for power in range(2, self.resolution.bit_length()))

    @property
    def layers(self) -> int:
        """L: codes w of one picture, one for each convolution and one for the last RGB layer."""
        return 2 * len(self.resolutions)

    def width(self, resolution: int) -> int:
        """C at a resolution."""
        return min(self.channels * self.resolution // resolution, self.most_channels)


SIZES: dict[int, Config] = {
    32: Config(32, latent=32, mapping=2, channels=8, most_channels=32, group=4),
    64: Config(64, latent=512, mapping=8, channels=256, most_channels=512, group=4),
    128: Config(128, latent=512, mapping=8, channels=128, most_channels=512, group=4),
    256: Config(256, latent=512, mapping=8, channels=64, most_channels=512, group=4),
    512: Config(512, latent=512, mapping=8, channels=64, most_channels=512, group=4),
    1024: Config(1024, latent=512, mapping=8, channels=32, most_channels=512, group=4),
}
"""512 and 1024 are the paper's configuration F; 64 to 256 have half its channels; 32 trains in minutes on a CPU."""
