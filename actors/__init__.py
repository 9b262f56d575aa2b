"""The cast: one thin Monarch actor class a file; `launch` alone knows them all."""

if __name__ != "forge.actors":
    raise ImportError(
        f"this package is forge.actors, imported here as {__name__!r}: import forge.actors "
        "(run `pip install -e .` in the checkout first)"
    )
