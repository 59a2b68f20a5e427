"""GPT-2 in plain JAX: sizes, model, attention, sampling, and the recipe.

Array names carry their shape: B rows, T tokens, D width, H heads, K width of a head, V vocabulary, L layers.
"""
