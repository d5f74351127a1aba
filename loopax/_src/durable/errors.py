"""What a durable loop raises and warns of."""


class SaveError(OSError):
    """A state or outputs could not be written; the run has stopped, and its last good save is as it was."""


class DamagedSaveWarning(UserWarning):
    """A save, or outputs that belong to it, are damaged, and a save before it is taken."""


class AnotherProgramWarning(UserWarning):
    """A run goes on with another program, because it was told to, or under another version of JAX."""
