"""Bounds of options, said alike by every class."""


def require_at_least(
    least: float, owner: str, error: type[ValueError] = ValueError, **options: float | None
) -> None:
    """Refuse options under a bound; one that is None is not given.

    Args:
        least: The bound.
        owner: The class whose options they are, for the message; empty where it is not named.
        error: What is raised.
        options: Values by name.

    Raises:
        ValueError: If one is less, or NaN; the message names it.
    """
    for name, value in options.items():
        if value is not None and not value >= least:
            raise error(f"{owner}{': ' if owner else ''}{name} must be at least {least}, got {value}")
