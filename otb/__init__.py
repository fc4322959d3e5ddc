"""The Optimal Token Baseline on Hugging Face TRL: `from otb import OTBTrainer, OTBConfig` replaces GRPOTrainer.

Importing this package imports neither torch nor trl; both names are loaded on first use.
"""

__all__ = ["OTBConfig", "OTBTrainer"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in __all__:
        from otb.training import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'otb' has no attribute {name!r}; it exports {', '.join(__all__)}.")
