"""Every exception this package raises on purpose.

Each derives from :class:`GefenError` and from the built-in exception that code written for
``torch.optim`` would expect, so both ``except GefenError`` and ``except ValueError`` work.
"""


class GefenError(Exception):
    """Base of all errors raised on purpose by this package."""


class InvalidArgumentError(GefenError, ValueError):
    """A hyperparameter or constructor argument is outside its documented range."""


class UnsupportedParameterError(GefenError, ValueError):
    """A parameter or gradient cannot be optimized; the message names it and says why."""


class UnsupportedFeatureError(GefenError, NotImplementedError):
    """A documented option that this version does not implement was asked for."""


class CudaUnavailable(GefenError, RuntimeError):
    """The CUDA kernels cannot run on a device; the message gives every reason."""


class CudaKernelError(GefenError, RuntimeError):
    """The driver refused to load or launch a kernel; the message has its text and the kernel."""


class CheckpointError(GefenError, ValueError):
    """A state dict is truncated, foreign or does not match; nothing was loaded."""


class ShardedStepError(GefenError, RuntimeError):
    """Base of the errors that every rank of a connected component raises together."""


class ParameterOrderError(ShardedStepError):
    """Ranks registered the same parameters in different orders."""


class ParameterIdentityError(ShardedStepError):
    """Ranks hold different parameters, or parameters that nothing rank-local can tell apart."""


class GradientPresenceError(ShardedStepError):
    """A parameter has a gradient on some ranks only."""


class HyperparameterMismatchError(ShardedStepError):
    """A hyperparameter, a sharded mode or the optimizer's state differs between ranks."""


class PeerFailureError(ShardedStepError):
    """A rank failed on its own or did not come; its own error is the cause on that rank."""
