"""Pipeline layouts: which layers run in which model chunk of which stage, and the flags of Megatron and hosts for them.

A layout is a tuple of pieces, one for each model chunk, in the order in which a microbatch passes them (all first
chunks from the first stage to the last, then all second chunks, ...). A piece is a string of layers: ``E`` embedding,
``t`` decoder layer, ``m`` multi-token-prediction layer, ``L`` loss (with the output layer).

Source: ``megatron/core/transformer/pipeline_parallel_layer_layout.py`` (the language and its rules, from 0.13; the
rules for MTP as of 0.16); for the other flags ``get_num_layers_to_build`` and the checks in
``TransformerConfig.__post_init__``. The tests give the same layouts to both.

Hosts with options of their own: verl 0.9.1, SkyRL 0.4.0, ms-swift 4.6.0 and Megatron-Bridge 0.6.2. Megatron-LM, and
slime, which has Megatron-LM's parser, take the flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

Layout = tuple[str, ...]

_KINDS = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}
_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_REPEAT = re.compile(r"(.)\*(\d+)")
MOST_LAYERS = 10_000
_LAYOUT = "--pipeline-model-parallel-layout"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
#: Places no layer: exchanges overlap with compute also while the pipeline fills and drains.
OVERLAP = "--overlap-p2p-communication-warmup-flush"
#: The fields of Megatron-Core's configuration for Megatron-LM's flags; Megatron-Bridge's models have the same fields.
_FIELDS = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--account-for-embedding-in-pipeline-split": "account_for_embedding_in_pipeline_split",
    "--account-for-loss-in-pipeline-split": "account_for_loss_in_pipeline_split",
    _LAYOUT: "pipeline_model_parallel_layout",
    _VIRTUAL: "virtual_pipeline_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--recompute-granularity": "recompute_granularity",
    "--recompute-method": "recompute_method",
    "--recompute-num-layers": "recompute_num_layers",
    OVERLAP: "overlap_p2p_comm_warmup_flush",
}
_CHUNKS, _STAGES = "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"
#: The fields for which verl and SkyRL have options of their own.
_OWN = {"verl": {_CHUNKS, _STAGES}, "skyrl": {_STAGES}}
#: Where verl's engine of each role has its options; the reference uses the actor's. A run without roles is SFT.
_VERL = {None: "engine", "critic": "critic.megatron"}
_SKYRL = {"ref": "trainer.ref.megatron_config"}


def parse_layout(text: str, pp: int) -> Layout:
    """Returns the pieces of a ``--pipeline-model-parallel-layout`` string, which may have any number of chunks.

    ``|`` separates pieces, ``x*n`` repeats one character, ``(...)*n`` repeats a group, and commas are ignored. Groups
    are expanded first and do not nest, as in Megatron.

    Raises:
        ValueError: an unknown character, or a number of pieces that is no multiple of pp. `check_layout` checks the
            rules for layers.
    """
    expanded = text.replace(",", "")
    for pattern in (_GROUP, _REPEAT):
        # A layout comes from a command line or a file: it must not be able to fill the memory.
        size = sum(len(match[1]) * int(match[2][:9]) for match in pattern.finditer(expanded))
        if size > MOST_LAYERS or any(len(match[2]) > 9 for match in pattern.finditer(expanded)):
            raise ValueError(f"layout {_short(text)} expands to more than {MOST_LAYERS} layers")
        expanded = pattern.sub(lambda match: match[1] * int(match[2]), expanded)
    pieces = tuple(expanded.split("|"))
    for piece in pieces:
        for character in piece:
            if character not in _KINDS:
                raise ValueError(
                    f"layout {_short(text)}: unexpected {character!r} in {_short(piece)}; "
                    "layers are E, t, m and L, pieces end with |"
                )
    if len(pieces) % pp:
        raise ValueError(f"layout {_short(text)} has {len(pieces)} pieces, expected a multiple of pp={pp}")
    return pieces


def format_layout(pieces: Sequence[str]) -> str:
    """Returns the compact string of a layout, such as ``Et*6|(t*4|)*6t*2L``; `parse_layout` gives the pieces back."""
    texts = ["".join(_repeated(letter, len(list(run))) for letter, run in groupby(piece)) for piece in pieces]
    ended = "".join(_repeated(f"{text}|", len(list(run))) for text, run in groupby(texts[:-1]))
    return ended + texts[-1]


def check_layout(pieces: Sequence[str], pp: int, layers: int, mtp_layers: int = 0) -> None:
    """Refuses the layouts that Megatron's ``validate_layer_layout`` refuses.

    Raises:
        ValueError: the pieces do not divide by ``pp``; E is not first or L not last; not ``layers`` decoder layers or
            ``mtp_layers`` MTP layers; an MTP layer before a decoder layer, outside a stage's last chunk, or apart from
            the others.
    """
    shown = _short("|".join(pieces))
    if not pieces or len(pieces) % pp:
        raise ValueError(f"layout {shown} has {len(pieces)} pieces, expected a multiple of pp={pp}")
    flat = "".join(pieces)
    if not flat.startswith("E"):
        raise ValueError(f"layout {shown} must begin with the embedding (E)")
    if not flat.endswith("L"):
        raise ValueError(f"layout {shown} must end with the loss (L)")
    for letter, wanted in (("E", 1), ("L", 1), ("t", layers), ("m", mtp_layers)):
        if flat.count(letter) != wanted:
            raise ValueError(
                f"layout {shown} has {flat.count(letter)} x {_KINDS[letter]} ({letter}), expected {wanted}"
            )
    if "m" in flat and flat.rfind("t") > flat.index("m"):
        raise ValueError(f"layout {shown}: MTP layers (m) must follow every decoder layer (t)")
    if "m" in "".join(pieces[:-pp]):
        raise ValueError(f"layout {shown}: MTP layers (m) must be in the last chunk of their stage")
    if sum("m" in piece for piece in pieces) > 1:
        raise ValueError(f"layout {shown}: all MTP layers (m) must be in one piece")


def layers_per_stage(pieces: Sequence[str], pp: int) -> tuple[int, ...]:
    """Returns how many decoder layers each stage holds, over its chunks."""
    return tuple(sum(piece.count("t") for piece in pieces[stage::pp]) for stage in range(pp))


def default_layout(
    pp: int,
    vpp: int,
    layers: int,
    mtp_layers: int = 0,
    *,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> Layout | None:
    """Returns the layout that Megatron builds without a layout string; None if it refuses to.

    ``first``, ``last``: ``--decoder-first-pipeline-num-layers``, ``--decoder-last-pipeline-num-layers``.
    """
    uneven = first is not None or last is not None
    if (uneven and (account_for_embedding or account_for_loss)) or any(n is not None and n < 1 for n in (first, last)):
        return None
    middle_stages = pp - (first is not None) - (last is not None)
    middle_layers = layers + account_for_embedding + account_for_loss - (first or 0) - (last or 0)
    if middle_stages < 0 or middle_layers < 0 or bool(middle_layers) != bool(middle_stages):
        return None
    per_stage, rest = divmod(middle_layers, middle_stages) if middle_stages else (0, 0)
    stages = [per_stage] * pp
    stages[0] = per_stage if first is None else first
    stages[-1] = stages[-1] if last is None else last
    if rest or any(count % vpp for count in stages):
        return None
    counts = [count // vpp for _ in range(vpp) for count in stages]
    counts[0] -= account_for_embedding
    counts[-1] -= account_for_loss
    return of_counts(counts, mtp_layers)


def of_counts(layers: Iterable[int], mtp_layers: int) -> Layout:
    """Returns the layout with these numbers of decoder layers in its pieces, and all MTP layers in the last one."""
    pieces = ["t" * count for count in layers]
    pieces[0] = "E" + pieces[0]
    pieces[-1] += "m" * mtp_layers + "L"
    return tuple(pieces)


def to_flags(pieces: Sequence[str], pp: int) -> tuple[str, ...]:
    """Returns the simplest Megatron command-line arguments that ask for a layout.

    The balanced layout needs none. Otherwise it is the number of layers of the first or last stage, or an embedding or
    loss counted as a layer, or ``--pipeline-model-parallel-layout`` (megatron-core 0.13 and later), in this order. With
    several chunks per stage, ``--num-virtual-stages-per-pipeline-rank`` is added, except to a layout string. The
    arguments replace all such arguments that the run had, including ``--num-layers-per-virtual-pipeline-stage``.

    Raises:
        ValueError: see `check_layout`.
    """
    wanted, vpp = tuple(pieces), max(1, len(pieces) // pp)
    flat = "".join(wanted)
    layers, mtp_layers = flat.count("t"), flat.count("m")
    check_layout(wanted, pp, layers, mtp_layers)
    chunks = (_VIRTUAL, str(vpp)) if vpp > 1 else ()
    stages = layers_per_stage(wanted, pp)
    for first, last in ((None, None), (stages[0], None), (None, stages[-1]), (stages[0], stages[-1])):
        if default_layout(pp, vpp, layers, mtp_layers, first=first, last=last) == wanted:
            counts = (("first", first), ("last", last))
            named = ((f"--decoder-{end}-pipeline-num-layers", str(count)) for end, count in counts if count is not None)
            return (*chain.from_iterable(named), *chunks)
    for embedding, loss in ((True, False), (False, True), (True, True)):
        accounted = default_layout(pp, vpp, layers, mtp_layers, account_for_embedding=embedding, account_for_loss=loss)
        if accounted == wanted:
            names = (("embedding", embedding), ("loss", loss))
            return (*(f"--account-for-{name}-in-pipeline-split" for name, counted in names if counted), *chunks)
    return (_LAYOUT, format_layout(wanted))


def _repeated(text: str, count: int) -> str:
    """Returns ``text`` repeated ``count`` times in the language of layouts, whichever way is shorter; ``t*2``, not
    ``tt``."""
    if count == 1:
        return text
    short = f"{text}*{count}" if len(text) == 1 else f"({text})*{count}"
    return short if len(text) == 1 or len(short) < len(text) * count else text * count


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def options_of(framework: str | None, role: str | None, flags: Sequence[str], stages: int) -> tuple[str, ...] | None:
    """Returns Megatron-LM's ``flags`` for a pipeline of ``stages`` as ``framework`` takes them for the models of
    ``role``; None if it takes the flags themselves, is not known, or has no option for one of them."""
    given = []
    for number, word in enumerate(flags):
        if word.startswith("--"):  # a flag without a value is true
            following = flags[number + 1 : number + 2]
            given.append((word, following[0] if following and not following[0].startswith("--") else "True"))
    if framework is None or not given or not {flag for flag, _ in given} <= _FIELDS.keys():
        return None
    # Megatron-LM counts the chunks of a layout itself, and refuses the option beside it. verl does not count them.
    pieces = [len(parse_layout(value, stages)) for flag, value in given if flag == _LAYOUT]
    given += [(_VIRTUAL, str(count // stages)) for count in pieces if count > stages]
    if framework == "ms-swift":
        words = ((_CHUNKS if flag == _VIRTUAL else flag[2:].replace("-", "_"), value) for flag, value in given)
        return tuple(chain.from_iterable((f"--{name}", value.replace("True", "true")) for name, value in words))
    if framework == "megatron-bridge":
        own = other = "model"
    elif framework == "verl":
        own = _VERL.get(role, "actor_rollout_ref.actor.megatron")
        other = f"++{own}.override_transformer_config"
    elif framework == "skyrl" and all(flag != _VIRTUAL for flag, _ in given):
        own = _SKYRL.get(role or "", "trainer.policy.megatron_config")
        other = f"{own}.transformer_config_kwargs"
    else:
        return None
    # Hydra's grammar would read |, * and parentheses in a value without quotes.
    fields = ((_FIELDS[flag], value if value.isalnum() else f'"{value}"') for flag, value in given)
    return tuple(f"{own if name in _OWN.get(framework, ()) else other}.{name}={value}" for name, value in fields)
