"""Compare published training speeds on TPUs with the predicted floor for the same model and slice. Seconds.

Floors are for compute alone. FLOPs of a token are counted as in this project: 6 for each weight of a matrix product,
and 12 x layers x width x context for attention. Llama's shapes are from its model cards, with contexts 8,192 (8B) and
2,048 (70B); tpuchat's FLOPs follow from its figures.
"""

from benchmarks.report import Settings, Table
from tpuswarm import catalog
from tpuswarm.plan.speed import PUBLISHED, Published, expected_band


def run(settings: Settings) -> Table:
    return Table(
        "Published speeds beside the predicted floor",
        (
            "system",
            "model",
            "TPU",
            "MFLOP per token",
            "floor, tokens/s per chip",
            "published",
            "published time ÷ floor",
            "share of peak: published, by our count",
            "band, without this system",
            "",
        ),
        [_row(published) for published in PUBLISHED],
        [
            "where only a share of the peak was published, tokens/s follow from it and do not test our count",
            "bands use only the other systems' figures",
        ],
    )


def transformer(layers: int, width: int, hidden: int, keys: int, vocab: int, context: int, gated: bool) -> float:
    """FLOPs of a token, forward and backward. hidden: width of the MLP; keys: width of keys and of values."""
    weights = layers * (2 * width**2 + 2 * width * keys + (3 if gated else 2) * width * hidden) + vocab * width
    return 6 * weights + 12 * layers * width * context


TPUCHAT_FLOPS_PER_TOKEN = 0.465 * 918e12 / 433_606
FLOPS = {
    "GPT-2 124M": transformer(12, 768, 3072, 768, 50304, 1024, False),
    "GPT-2 345M": transformer(24, 1024, 4096, 1024, 50304, 1024, False),
    "GPT-2 750M": transformer(36, 1280, 5120, 1280, 50304, 1024, False),
    "GPT-2 1.4B": transformer(48, 1536, 6144, 1536, 50304, 1024, False),
    "Llama 8B": transformer(32, 4096, 14336, 1024, 128256, 8192, True),
    "Llama 70B": transformer(80, 8192, 28672, 1024, 128256, 2048, True),
    "164M": TPUCHAT_FLOPS_PER_TOKEN,
}


def _row(published: Published) -> tuple[str, ...]:
    chip = catalog.find(published.slice).generation
    flops = FLOPS[published.model]
    floor = chip.peak_bf16 / flops
    reached = published.tokens_per_s or published.share * floor
    guess = expected_band(published.generation, without=published.system)
    ours = f"{reached / floor:.1%}" if published.tokens_per_s else "–"
    return (
        published.system,
        published.model,
        published.slice,
        f"{flops / 1e6:,.0f}",
        f"{floor:,.0f}",
        f"{reached:,.0f}",
        f"{floor / reached:.2f}",
        f"{published.share:.1%}, {ours}",
        f"{1 / guess.high:.2f} to {1 / guess.low:.2f}",
        "hit" if guess.low <= reached / floor <= guess.high else "**missed**",
    )
