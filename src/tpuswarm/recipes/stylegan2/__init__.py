"""StyleGAN2 in plain JAX, written from Karras et al. 2019 (1812.04948) and 2020 (1912.04958).

Array names carry their shape: B pictures, H and W rows and columns, C channels (I in, O out), L layers, D width of a
latent code, G pictures of a group.
"""
