"""What a durable loop raises and warns of."""


class SaveError(OSError):
    """A state or outputs could not be written. The run has stopped, and its last good save is unchanged."""


class DamagedSaveWarning(UserWarning):
    """A save, or outputs that belong to it, are damaged. The run continues from an earlier save."""


class AnotherProgramWarning(UserWarning):
    """A run continues with another program (`resume="anyway"`), or under another version of JAX."""
