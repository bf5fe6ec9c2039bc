"""Modules whose results depend on the number of rows that they get, for tests of the check of rows."""


def depending(module, first, size=0.05, before=False):
    """Make a module's result, or its input, depend on whether it gets at least `first` rows."""
    kind = type(module)

    def call(self, x, *args, **kwargs):
        factor = 1 + size * (x.shape[-2] >= first)
        return (
            kind.__call__(self, x * factor, *args, **kwargs)
            if before
            else _scaled(kind, self, x, args, kwargs, factor)
        )

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _scaled(kind, self, x, args, kwargs, factor):
    made = kind.__call__(self, x, *args, **kwargs)
    return (made[0] * factor, *made[1:]) if isinstance(made, tuple) else made * factor
