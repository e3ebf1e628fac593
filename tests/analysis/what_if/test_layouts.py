from __future__ import annotations

import inspect
import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaprof.analysis.what_if.layouts import (
    check_layout,
    default_layout,
    format_layout,
    layers_per_stage,
    parse_layout,
    to_flags,
)

IN_USE = [
    ("Et*4|(tttt|)*14tmL", 16),
    ("Et|(tt|)*30mL", 32),
    ("Et*2|(tt|)*22t|(tt|)*7mL", 32),
    ("Et*3|(tt|)*4ttt|m|L", 8),
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8),
    ("Et*18|t*24|t*24|t*12m*7L", 4),
]


def megatron_has_the_mtp_rules() -> bool:
    """megatron-core 0.16 and later; before, MTP layers had to be with the loss, or were not checked at all."""
    try:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    except ImportError:
        return False
    return "pp_rank" in inspect.signature(PipelineParallelLayerLayout.get_layer_offset).parameters


against_megatron = pytest.mark.skipif(
    not megatron_has_the_mtp_rules(), reason="the rules compared with are those of megatron-core 0.16 and later"
)

layers = st.text("EtmL", max_size=6)


def megatron_pieces(text: str, pp: int) -> tuple[str, ...] | None:
    """The pieces as megatron-core parses them; None if it refuses. Back in the order of the text."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        layout = PipelineParallelLayerLayout(text, pp)
    except Exception:
        return None
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    return tuple(
        "".join(letters[layer.name] for layer in layout.layout[stage][chunk])
        for chunk in range(layout.virtual_pipeline_model_parallel_size)
        for stage in range(pp)
    )


def megatron_accepts(text: str, pp: int, decoder_layers: int, mtp_layers: int) -> bool:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        PipelineParallelLayerLayout(text, pp).validate_layer_layout(decoder_layers, mtp_layers)
    except (AssertionError, IndexError, NotImplementedError):
        return False
    return True


def accepts(pieces: tuple[str, ...], pp: int, decoder_layers: int, mtp_layers: int) -> bool:
    try:
        check_layout(pieces, pp, decoder_layers, mtp_layers)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("text", "pp"), IN_USE)
@against_megatron
def test_layouts_in_real_use_parse_as_in_megatron_and_round_trip(text, pp):
    pieces = parse_layout(text, pp)
    flat = "".join(pieces)
    assert pieces == megatron_pieces(text, pp)
    check_layout(pieces, pp, flat.count("t"), flat.count("m"))
    assert megatron_accepts(text, pp, flat.count("t"), flat.count("m"))
    assert parse_layout(format_layout(pieces), pp) == pieces
    assert sum(layers_per_stage(pieces, pp)) == flat.count("t")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("Etttttt", "ttL"), "Et*6|t*2L"),
        (("Et", *["tt"] * 30, "mL"), "Et|(t*2|)*30mL"),
        (("Et", "", "", "tL"), "Et||*2tL"),
        (("EttmmL",), "Et*2m*2L"),
        (("Et", "t", "tL"), "Et|t|tL"),
    ],
)
def test_format_is_compact(pieces, text):
    assert format_layout(pieces) == text


@given(st.lists(layers, min_size=1, max_size=12))
@against_megatron
def test_any_pieces_round_trip_here_and_in_megatron(pieces):
    text = format_layout(pieces)
    assert parse_layout(text, 1) == megatron_pieces(text, 1) == tuple(pieces)


@settings(max_examples=50)
@given(st.text("Etm|L()*,231x ", max_size=14), st.integers(1, 3))
@example("(t)*2*3", 1)
@example("((t|)*2)*2", 1)
@example("t*0L", 1)
@example("t**2", 1)
@example("(tt|)", 1)
@example("t*\u0663", 1)
@example("", 1)
@against_megatron
def test_any_text_is_read_as_megatron_reads_it(text, pp):
    expected = megatron_pieces(text, pp)
    if expected is None:
        with pytest.raises(ValueError, match="layout"):
            parse_layout(text, pp)
    else:
        assert parse_layout(text, pp) == expected


@st.composite
def nearly_valid_layouts(draw):
    """(pieces, pp, decoder layers, MTP layers): a valid order cut at random, then perhaps damaged."""
    pp, vpp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    count, mtp = draw(st.integers(0, 8)), draw(st.integers(0, 2))
    flat = "E" + "t" * count + "m" * mtp + "L"
    cuts = sorted(draw(st.lists(st.integers(0, len(flat)), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    if draw(st.booleans()):  # the end of the model is where the rules are
        cuts = sorted(min(len(flat), cut + count) for cut in cuts)
    pieces = [flat[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(flat)])]
    for _ in range(draw(st.integers(0, 2))):
        piece = draw(st.integers(0, len(pieces) - 1))
        at = draw(st.integers(0, len(pieces[piece])))
        pieces[piece] = pieces[piece][:at] + draw(st.sampled_from(["", "E", "t", "m", "L"])) + pieces[piece][at + 1 :]
    return tuple(pieces), pp, count + draw(st.sampled_from([0, 0, 0, 1])), mtp + draw(st.sampled_from([0, 0, 0, 1]))


@settings(max_examples=50)
@given(nearly_valid_layouts())
@example((("Etm", "mL"), 2, 1, 2))
@example((("Et", "tm", "t", "L"), 2, 3, 1))
@example((("Etm", "L", "", ""), 2, 1, 1))
@example((("", "Et", "", "L"), 2, 1, 0))
@against_megatron
def test_the_verdict_is_megatrons(layout):
    pieces, pp, decoder_layers, mtp_layers = layout
    verdict = megatron_accepts("|".join(pieces), pp, decoder_layers, mtp_layers)
    assert accepts(pieces, pp, decoder_layers, mtp_layers) == verdict


def test_both_verdicts_occur_and_say_what_is_wrong():
    for pieces, pp, words in [
        (("tE", "tL"), 2, "begin with the embedding"),
        (("Et", "Lt"), 2, "end with the loss"),
        (("Et", "tttL"), 2, r"4 x decoder layer \(t\), expected 3"),
        (("EtE", "ttL"), 2, "2 x embedding"),
        (("Etm", "ttL"), 2, "must follow every decoder layer"),
        (("Ett", "tm", "", "L"), 2, "last chunk"),
        (("Ett", "tm", "mL"), 3, "in one piece"),
        (("Ett", "t", "L"), 2, "multiple of pp=2"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_layout(pieces, pp, 3, "".join(pieces).count("m"))
    check_layout(("Ettt", "m", "L"), 3, 3, 1)


@pytest.mark.parametrize("text", ["t*999999999999", "(tttttttttt|)*99999999", "(t*99999|)*99999"])
def test_a_text_cannot_fill_the_memory(text):
    with pytest.raises(ValueError, match="expands to more than"):
        parse_layout(text, 1)


def test_number_of_pieces_is_checked():
    with pytest.raises(ValueError, match="3 pieces, expected a multiple of pp=2"):
        parse_layout("Et|t|tL", 2)


OPTIONS = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--account-for-embedding-in-pipeline-split": "account_for_embedding_in_pipeline_split",
    "--account-for-loss-in-pipeline-split": "account_for_loss_in_pipeline_split",
    "--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
}


def megatron_layers(pp: int, decoder_layers: int, options: dict[str, object]) -> list[int] | None:
    """Decoder layers of each piece in a real TransformerConfig with these flags; None if it refuses them."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    try:
        config = TransformerConfig(
            num_layers=decoder_layers,
            hidden_size=4,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            **options,
        )
        vpp = config.virtual_pipeline_model_parallel_size
        if config.pipeline_model_parallel_layout is not None:
            from megatron.core.transformer.enums import LayerType

            rows = config.pipeline_model_parallel_layout.layout
            return [rows[stage][chunk].count(LayerType.decoder) for chunk in range(vpp or 1) for stage in range(pp)]
        chunks = range(vpp) if vpp else [None]
        return [get_num_layers_to_build(config, chunk, stage) for chunk in chunks for stage in range(pp)]
    except (AssertionError, ValueError):
        return None


def options_of(flags: tuple[str, ...]) -> dict[str, object]:
    options: dict[str, object] = {}
    words = list(flags)
    while words:
        flag = words.pop(0)
        takes_value = words and not words[0].startswith("--")
        value = words.pop(0) if takes_value else True
        options[OPTIONS[flag]] = int(value) if value is not True and value.isdigit() else value
    return options


@against_megatron
def test_flags_build_the_layout_in_a_real_megatron_config():
    seen = set()
    chance = random.Random(7)
    layouts = [
        tuple(
            ("E" if piece == 0 else "") + "t" * count + ("L" if piece == pp * vpp - 1 else "")
            for piece, count in enumerate(counts)
        )
        for pp, vpp in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2))
        for counts in itertools.product(range(4), repeat=pp * vpp)
        if sum(counts)
    ]
    for pieces in layouts if len(layouts) < 900 else chance.sample(layouts, 900):
        for pp in {pp for pp in (1, 2, 3, 4) if len(pieces) % pp == 0 and (pp > 1 or len(pieces) == 1)}:
            flags = to_flags(pieces, pp)
            counts = [piece.count("t") for piece in pieces]
            assert megatron_layers(pp, sum(counts), options_of(flags)) == counts, (pieces, pp, flags)
            seen.add(tuple(flag for flag in flags if flag.startswith("--")))
    assert len(seen) >= 8


@against_megatron
def test_default_layout_refuses_what_megatron_config_refuses():
    refused = accepted = 0
    for pp, vpp, count, first, last in itertools.product(
        (2, 3, 4), (1, 2), range(2, 13), (None, 0, 1, 2, 4), (None, 2)
    ):
        for embedding, loss in itertools.product((False, True), repeat=2):
            options = {
                "num_layers_in_first_pipeline_stage": first,
                "num_layers_in_last_pipeline_stage": last,
                "account_for_embedding_in_pipeline_split": embedding,
                "account_for_loss_in_pipeline_split": loss,
                "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
            }
            ours = default_layout(
                pp, vpp, count, first=first, last=last, account_for_embedding=embedding, account_for_loss=loss
            )
            real = megatron_layers(pp, count, options)
            if real is not None and min(real) < 0:  # on two stages the config lets the other stage's share go below 0
                real = None
            assert (None if ours is None else [piece.count("t") for piece in ours]) == real, options
            refused, accepted = refused + (real is None), accepted + (real is not None)
    assert min(refused, accepted) > 50


@pytest.mark.parametrize(
    ("text", "pp", "flags"),
    [
        ("Et*4|t*4L", 2, ()),
        ("Et*6|t*2L", 2, ("--decoder-first-pipeline-num-layers", "6")),
        ("Et*4|t*4|t*4|t*3L", 4, ("--decoder-last-pipeline-num-layers", "3")),
        (
            "Et*3|t*4|t*4|t*2mL",
            4,
            ("--decoder-first-pipeline-num-layers", "3", "--decoder-last-pipeline-num-layers", "2"),
        ),
        ("Et|t|t|tL", 2, ("--num-virtual-stages-per-pipeline-rank", "2")),
        (
            "Et|t*2|t*2|tL",
            2,
            (
                "--account-for-embedding-in-pipeline-split",
                "--account-for-loss-in-pipeline-split",
                "--num-virtual-stages-per-pipeline-rank",
                "2",
            ),
        ),
        ("Et*3|t*2|t*4|t*3L", 4, ("--pipeline-model-parallel-layout", "Et*3|t*2|t*4|t*3L")),
        ("Et*3|t*3|m|L", 4, ("--pipeline-model-parallel-layout", "Et*3|t*3|m|L")),
    ],
)
def test_the_simplest_flags_are_chosen(text, pp, flags):
    assert to_flags(parse_layout(text, pp), pp) == flags
