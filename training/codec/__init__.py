"""Train the codec of `nano`: the modules of `shoal.codec` themselves, on shards that may still be being written.

    python -m training.codec --corpus DIR --out DIR --minutes 22

Three stages. First the autoencoder learns without codes; then every codebook is laid out by principal directions and
k-means, since codebooks learned from random starts collapse; then, after a fraction of the time, discriminators join.
The wall clock drives the schedule, so a slow machine gets fewer steps but a finished model. `--resume` continues
from a checkpoint. `--start DIR --freeze-codes` trains the decoding side only: codes made before stay valid.

The networks run here in another form than at inference: activations lie [batch, time, channels] and each convolution is
one matrix product over shifted copies. The weights are the modules' own, and a test holds both forms equal.
"""

from training.codec.command import main, make_plan, parse_arguments, prepare
from training.codec.compile import compile_networks, make_runner
from training.codec.files import PIECE_BYTES, keep_codebooks, load_codec, save_codec, save_whole
from training.codec.initialisation import initialise
from training.codec.networks import decode_latent, encode_latent
from training.codec.plan import NANO, NANO_24K, Mode, Pace, Plan
from training.codec.quantiser import Quantised, codebooks, lay_out_codebooks, perplexities, quantise, revive
from training.codec.reel import Reel
from training.codec.run import Run
from training.codec.trainer import Trainer

__all__ = [
    "NANO",
    "NANO_24K",
    "PIECE_BYTES",
    "Mode",
    "Pace",
    "Plan",
    "Quantised",
    "Reel",
    "Run",
    "Trainer",
    "codebooks",
    "compile_networks",
    "decode_latent",
    "encode_latent",
    "initialise",
    "keep_codebooks",
    "lay_out_codebooks",
    "load_codec",
    "main",
    "make_plan",
    "make_runner",
    "parse_arguments",
    "perplexities",
    "prepare",
    "quantise",
    "revive",
    "save_codec",
    "save_whole",
]
