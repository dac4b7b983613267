"""Train the language model of `nano`: the modules of `shoal.model` themselves, on codes that are still being made.

    python -m training.dual_ar --codes build/codes --heldout-codes build/heldout-codes --out build/nano-lm --minutes 20

With `--teachers` the same command also speaks the corpus and encodes it, in processes beside this one, and training
starts as soon as enough is there. The wall clock drives the schedule: after a warm-up the rates stay, then fall in a
straight line to the end. The result is the average of the weights that did best on held-out sentences. `--resume`
continues from the checkpoint in --out.
"""

from training.dual_ar.command import main
from training.dual_ar.files import save_language_model
from training.dual_ar.plan import Pace, Plan
from training.dual_ar.run import Run
from training.dual_ar.trainer import Trainer, split_weights

__all__ = ["Pace", "Plan", "Run", "Trainer", "main", "save_language_model", "split_weights"]
