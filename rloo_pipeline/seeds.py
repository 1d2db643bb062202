"""One seed per (run, purpose, iteration, prompt, sample), the same on every machine."""

import hashlib


def derive(seed: int, *parts: str | int) -> int:
    """A seed in [0, 2**63) from the run's seed and what it is for.

    The parts are length-prefixed before hashing, so ("ab", "c") and ("a", "bc") differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *parts):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return int.from_bytes(digest.digest(), "big") >> 1
