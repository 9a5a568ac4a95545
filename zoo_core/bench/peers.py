"""Public implementations of the same mechanisms, on the same work.

Each runs on the same q, k and v: where a library's module projects its input itself, the
projections are replaced by ones that hand out what was projected before. So a peer pays for its
attention alone, as the mechanism does, and is never charged for what we do not measure of ours.
Sizes (rank, features, window, landmarks, hashes) are the mechanism's own. Peers run uncompiled in
every mode but where they compile themselves, and without padding, which few of them can mask.

`pip install 'zoo-core[peers]'` brings them, `[gpu]` those for GPUs; what is missing is passed over
in words.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_core.bench.competitors import Inputs, Work
from zoo_core.bench.libraries import (
    Options,
    building,
    check_nystrom,
    check_yoso,
    divides,
    imported,
)
from zoo_core.errors import BenchError

Build = Callable[[Any, Inputs, Options], Work]


@dataclass(frozen=True)
class Peer:
    """One implementation of one mechanism.

    name: as in tables. module: what to import. install: the distribution to install.
    differs: where the work is not quite the same, in words.
    only: the kind of device it is for; "" for all.
    """

    mechanism: str
    name: str
    module: str
    build: Build
    install: str
    differs: str = ""
    only: str = ""

    def work(self, inputs: Inputs, options: Options) -> Work:
        """Its computation.

        Raises BenchError in words that start with its name: it is not installed, cannot be
        imported or built, or cannot do the same work.
        """
        if inputs.key_padding is not None:
            raise BenchError(f"{self.name}: is measured without padding only")
        library = imported(self.module, self.name, self.install)
        with building(self.name):
            work = self.build(library, inputs, options)
        work.name, work.options = self.name, dict(options)
        how = {"device": inputs.case.device, "dtype": getattr(torch, inputs.case.dtype)}
        for module in work.modules:
            module.to(**how)
            parameters = (p for p in module.parameters() if p.requires_grad)
            work.leaves = (*work.leaves, *parameters)
        return work


def peers_of(mechanism: str, device: str = "cpu") -> list[Peer]:
    """The known public implementations of a mechanism for a device, installed or not."""
    return [peer for peer in PEERS if peer.mechanism == mechanism and device.startswith(peer.only)]


class Given(nn.Module):
    """Stands where a library projects its input, and gives what was projected before."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """The given value, whatever x is."""
        return self.value


def _rows(x: Tensor) -> Tensor:
    """(B, H, N, D) -> a leaf (B, N, H * D), as a projection gives it."""
    return x.detach().transpose(1, 2).flatten(2).contiguous().requires_grad_()


def _joined(*parts: Tensor) -> Tensor:
    """Several (B, H, N, D) -> a leaf (B, N, parts * H * D), as a fused projection gives it."""
    return torch.cat([_rows(x).detach() for x in parts], -1).requires_grad_()


def _flat(x: Tensor) -> Tensor:
    """(B, H, N, D) -> a leaf (B * H, N, D)."""
    return x.detach().flatten(0, 1).requires_grad_()


def _performer(library: Any, inputs: Inputs, options: Options) -> Work:
    if options["kind"] == "hyperbolic":
        raise BenchError("has no hyperbolic features")
    q, k, v = inputs.q, inputs.k, inputs.v
    module = library.FastAttention(
        dim_heads=inputs.case.width,
        nb_features=options["features"],
        ortho_scaling=1 if options["norms"] == "sqrt_d" else 0,
        generalized_attention=options["kind"] == "relu",
    )
    return Work("", lambda: module(q, k, v), (q, k, v), (module,))


def _linformer(library: Any, inputs: Inputs, options: Options) -> Work:
    if options["share"] not in ("heads", "kv"):
        raise BenchError(f"shares E and F between heads, the mechanism has {options['share']!r}")
    case, (q, k, v) = inputs.case, map(_rows, (inputs.q, inputs.k, inputs.v))
    module = library.LinformerSelfAttention(
        case.dim,
        seq_len=case.length,
        k=options["rank"],
        heads=case.heads,
        dim_head=case.width,
        share_kv=options["share"] == "kv",
    )
    module.to_q, module.to_k, module.to_out = Given(q), Given(k), nn.Identity()
    module.to_v = Given(v)
    return Work("", lambda: module(q), (q, k, v), (module,))


def _nystrom(library: Any, inputs: Inputs, options: Options) -> Work:
    case, qkv = inputs.case, _joined(inputs.q, inputs.k, inputs.v)
    divides(case.length, options["landmarks"], "the landmarks")
    module = library.NystromAttention(
        case.dim,
        dim_head=case.width,
        heads=case.heads,
        num_landmarks=options["landmarks"],
        pinv_iterations=options["iterations"],
        residual=options["conv"] > 0,
        residual_conv_kernel=options["conv"] or 33,
    )
    module.to_qkv, module.to_out = Given(qkv), nn.Identity()
    x = qkv.detach()[..., : case.dim]
    return Work("", lambda: module(x), (qkv,), (module,))


def _local(library: Any, inputs: Inputs, options: Options) -> Work:
    q, k, v = map(_flat, (inputs.q, inputs.k, inputs.v))
    module = library.LocalAttention(
        window_size=options["window"],
        look_backward=1,
        look_forward=1,
        exact_windowsize=True,
        autopad=True,
        use_rotary_pos_emb=False,
    )
    return Work("", lambda: module(q, k, v), (q, k, v), (module,))


def _linear(library: Any, inputs: Inputs, options: Options) -> Work:
    q, k, v = inputs.q, inputs.k, inputs.v
    return Work("", lambda: library.linear_attn(q, k, v), (q, k, v))


def _reformer(library: Any, inputs: Inputs, options: Options) -> Work:
    bucket, hashes = options["chunk"], options["rounds"]
    divides(inputs.case.length, 2 * bucket, "two chunks")
    qk, v = _flat(inputs.q), _flat(inputs.v)
    module = library.LSHAttention(bucket_size=bucket, n_hashes=hashes, causal=False)
    return Work("", lambda: module(qk, v), (qk, v), (module,))


def _memory_compressed(library: Any, inputs: Inputs, options: Options) -> Work:
    if options["pool"] != "conv":
        raise BenchError("compresses by a convolution, the mechanism by a mean")
    case, qkv = inputs.case, _joined(inputs.q, inputs.k, inputs.v)
    module = library.MemoryCompressedAttention(
        case.dim, heads=case.heads, compression_factor=options["factor"]
    )
    module.to_qkv, module.to_out = Given(qkv), nn.Identity()
    x = qkv.detach()[..., : case.dim]
    return Work("", lambda: module(x), (qkv,), (module,))


def _isab(library: Any, inputs: Inputs, options: Options) -> Work:
    case, q = inputs.case, _rows(inputs.q)
    if case.width != 64:
        raise BenchError("has heads of width 64 only; use --width 64")
    kv = _joined(inputs.k, inputs.v)
    module = library.ISAB(dim=case.dim, heads=case.heads, num_latents=options["points"])
    module.attn1.to_kv = Given(kv)
    module.attn2.to_q, module.attn2.to_out = Given(q), nn.Identity()
    return Work("", lambda: module(q), (q, kv), (module,))


def _transformers_nystrom(library: Any, inputs: Inputs, options: Options) -> Work:
    case = inputs.case
    check_nystrom(case.length, options)
    config = library.NystromformerConfig(
        hidden_size=case.dim,
        num_attention_heads=case.heads,
        num_landmarks=options["landmarks"],
        segment_means_seq_len=case.length,
        attention_probs_dropout_prob=0.0,
        conv_kernel_size=options["conv"] or 1,
    )
    module = _modeling(library, "nystromformer").NystromformerSelfAttention(config)
    if not options["conv"]:
        module.conv_kernel_size = None
        del module.conv
    return _bert_like(module, inputs)


def _transformers_yoso(library: Any, inputs: Inputs, options: Options) -> Work:
    check_yoso(options)
    case = inputs.case
    config = library.YosoConfig(
        hidden_size=case.dim,
        num_attention_heads=case.heads,
        attention_probs_dropout_prob=0.0,
        use_expectation=True,
        hash_code_len=options["bits"],
    )
    module = _modeling(library, "yoso").YosoSelfAttention(config)
    mask = torch.zeros(case.batch, case.length, device=case.device)
    return _bert_like(module, inputs, mask)


def _bert_like(module: Any, inputs: Inputs, *mask: Tensor) -> Work:
    """A self-attention of transformers with query, key and value Linears."""
    q, k, v = map(_rows, (inputs.q, inputs.k, inputs.v))
    module.query, module.key, module.value = Given(q), Given(k), Given(v)
    return Work("", lambda: module(q, *mask), (q, k, v), (module,))


def _modeling(library: Any, package: str) -> Any:
    return importlib.import_module(f"{library.__name__}.models.{package}.modeling_{package}")


def _flex(library: Any, inputs: Inputs, options: Options) -> Work:
    """A sliding window as a block mask, compiled, as its documentation asks."""
    q, k, v, window = inputs.q, inputs.k, inputs.v, options["window"]
    length = inputs.case.length

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        within: Tensor = (query - key).abs() <= window
        return within

    # Compiled as well: otherwise it asks for all pairs of tokens at once, and keeps the answers.
    make: Any = torch.compile(library.create_block_mask)
    mask = make(near, None, None, length, length, device=inputs.case.device)
    compiled: Any = torch.compile(library.flex_attention, dynamic=False)
    return Work("", lambda: compiled(q, k, v, block_mask=mask), (q, k, v))


def _fla_linear(library: Any, inputs: Inputs, options: Options) -> Work:
    if options["feature_map"] != "elu":
        raise BenchError(f"is measured with elu + 1, the mechanism has {options['feature_map']!r}")
    q, k, v = map(_tokens_first, (inputs.q, inputs.k, inputs.v))

    def attend() -> Any:
        return library.chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v)

    return Work("", attend, (q, k, v))


def _fla_delta(library: Any, inputs: Inputs, options: Options) -> Work:
    if inputs.case.dtype not in ("bfloat16", "float16"):
        raise BenchError(f"has no {inputs.case.dtype}; use --dtype bfloat16")
    q, k, v = map(_tokens_first, (inputs.q, inputs.k, inputs.v))
    strengths = torch.sigmoid(v.detach()[..., 0]).requires_grad_()
    leaves = (q, k, v, strengths)

    def one_way(*tokens: Tensor) -> Tensor:
        out: Tensor = library.chunk_delta_rule(*tokens, use_qk_l2norm_in_kernel=True)[0]
        return out

    def both_ways() -> Tensor:
        return (one_way(*leaves) + one_way(*(x.flip(1) for x in leaves)).flip(1)) / 2

    return Work("", both_ways, leaves)


def _tokens_first(x: Tensor) -> Tensor:
    """(B, H, N, D) -> a leaf (B, N, H, D)."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_()


_EXTRA = "pip install 'zoo-core[peers]'"
_KERNELS = "pip install 'zoo-core[gpu]'"
_NEWER = "install a newer version"


def _lucidrains(mechanism: str, name: str, module: str, build: Build, differs: str = "") -> Peer:
    return Peer(mechanism, name, module, build, _EXTRA, differs)


PEERS = (
    _lucidrains("performer", "performer-pytorch", "performer_pytorch", _performer),
    _lucidrains("linformer", "linformer", "linformer", _linformer),
    _lucidrains("nystromformer", "nystrom-attention", "nystrom_attention", _nystrom),
    _lucidrains(
        "local", "local-attention", "local_attention", _local, "has no global prefix tokens"
    ),
    _lucidrains(
        "linear",
        "linear-attention-transformer",
        "linear_attention_transformer.linear_attention_transformer",
        _linear,
        "softmax as feature map instead of elu + 1, no normaliser",
    ),
    _lucidrains(
        "reformer",
        "reformer-pytorch",
        "reformer_pytorch",
        _reformer,
        "as many buckets as chunks, whatever the mechanism's number",
    ),
    _lucidrains(
        "memory_compressed",
        "memory-compressed-attention",
        "memory_compressed_attention",
        _memory_compressed,
        "has a null key",
    ),
    _lucidrains("induced", "isab-pytorch", "isab_pytorch", _isab, "projects its latents as well"),
    Peer(
        "nystromformer",
        "transformers nystromformer",
        "transformers",
        _transformers_nystrom,
        "pip install transformers",
    ),
    Peer(
        "yoso",
        "transformers yoso",
        "transformers",
        _transformers_yoso,
        "pip install transformers",
        "an output of length one, as normalise=l2",
    ),
    Peer(
        "local",
        "flex_attention",
        "torch.nn.attention.flex_attention",
        _flex,
        _NEWER,
        "has no global prefix tokens; compiled",
        only="cuda",
    ),
    Peer(
        "linear",
        "flash-linear-attention",
        "fla.ops.linear_attn",
        _fla_linear,
        _KERNELS,
        "is causal, and has nothing else",
        only="cuda",
    ),
    Peer(
        "delta",
        "flash-linear-attention delta",
        "fla.ops.delta_rule",
        _fla_delta,
        _KERNELS,
        "keys of length one and of a head's width as features, strengths as given",
        only="cuda",
    ),
)
