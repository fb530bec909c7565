"""One check for the lower bounds of options."""


def require_at_least(
    least: float, owner: str, error: type[ValueError] = ValueError, **options: float | None
) -> None:
    """Refuse options below a bound. None means that an option is not given.

    Args:
        least: The bound.
        owner: Name of the options' class, for the message; empty to leave it out.
        error: Class of the error.
        options: Values by name.

    Raises:
        ValueError: If a value is less than the bound, or NaN; the message names it.
    """
    for name, value in options.items():
        if value is not None and not value >= least:
            raise error(f"{owner}{': ' if owner else ''}{name} must be at least {least}, got {value}")
