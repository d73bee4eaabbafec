"""Blocks of a format as scales and codes in plain arrays, and back: what rounding with feedback works on.

Two kinds. *Levels*: a weight is a * level[code] + b, with a = d * scale of its group and b = -dmin * min of its group.
*Points*: several weights together are a * point[code], with a sign each where the format stores signs.
`FORMATS_OF` says for each format how its groups, scales and codes look; a test holds that taking blocks apart and
putting them together gives the same bytes, and that `values` is what the format's own kernel decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce

import numpy as np

from quant.codebooks import CODEBOOKS, IQ4_VALUES
from quant.errors import QuantError

FREE, EVEN, NONE = range(3)  # signs of points: one a weight; an even number of them in 8 weights; in the points
HALF, POWER = range(2)  # how d is stored: IEEE half, or a power of two


@dataclass
class Parts:
    """Blocks of `rows` rows. d, dmin: float32 [rows, blocks]; scales, mins: int32 [rows, blocks, groups]; codes: int32
    [rows, n] of levels, or [rows, n / dims] of points; negative: bool [rows, n], for points with signs."""

    d: np.ndarray
    dmin: np.ndarray
    scales: np.ndarray
    mins: np.ndarray
    codes: np.ndarray
    negative: np.ndarray


@dataclass(frozen=True)
class Layout:
    """How a format's values come about.

    name; group: weights that share a scale; block: weights that share d; scales: range of a group's stored scale, None
    where there is none but d; factor: what a stored scale s multiplies d by, `s`, or `2 s + 1` for odd; mins: range of
    the stored mins, None where there are none; offset: the block has a plain offset (in `dmin`, negated);
    levels: float32, ascending; or points: float32 [points, dims], with `signs`; sets: the points are so many sets of
    equal size, and a group takes all its points from one; apart, together: blocks -> Parts and back.
    """

    name: str
    group: int
    block: int
    apart: Callable[[np.ndarray], Parts]
    together: Callable[[Parts, np.ndarray], None]
    scales: tuple[int, int] | None = None
    odd: bool = False
    mins: tuple[int, int] | None = None
    offset: bool = False
    levels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    points: Callable[[], np.ndarray] | None = None
    signs: int = NONE
    sets: int = 1
    rounding: int = HALF

    @cached_property
    def book(self) -> np.ndarray:
        """The points, float32 [points, dims]; empty for levels."""
        return np.zeros((0, 1), np.float32) if self.points is None else np.ascontiguousarray(self.points(), np.float32)

    @property
    def dims(self) -> int:
        """Weights of a code."""
        return self.book.shape[1]

    @property
    def cell(self) -> int:
        """Weights whose codes are chosen together: one, or those that share a point or its signs' parity."""
        return 1 if self.points is None else 8 if self.signs == EVEN else self.dims

    def values(self, parts: Parts) -> np.ndarray:
        """The weights, float32 [rows, n], in the decoder's order of operations."""
        rows = parts.d.shape[0]
        factor = 2 * parts.scales + 1 if self.odd else parts.scales
        a = np.repeat(parts.d[..., None] * factor.astype(np.float32), self.group, -1).reshape(rows, -1)
        if self.points is not None:
            size = len(self.book)
            level = self.book[parts.codes % size].reshape(rows, -1)
            return a * np.where(parts.negative, -level, level)
        b = np.repeat(parts.dmin[..., None] * parts.mins.astype(np.float32), self.group, -1).reshape(rows, -1)
        return a * self.levels[parts.codes] - b


@lru_cache
def layout_of(name: str) -> Layout:
    """The layout of a format. Raises QuantError for formats that cannot be refined."""
    if name not in FORMATS_OF:
        raise QuantError(f"{name} cannot be refined; formats that can: {', '.join(FORMATS_OF)}")
    return FORMATS_OF[name]()


def apart(blocks: np.ndarray, layout: Layout) -> Parts:
    """Blocks [rows, blocks a row] -> scales and codes."""
    return layout.apart(blocks)


def together(parts: Parts, layout: Layout, dtype: np.dtype) -> np.ndarray:
    """Scales and codes -> blocks [rows, blocks a row] of a format's dtype."""
    blocks = np.zeros(parts.d.shape, dtype)
    layout.together(parts, blocks)
    return blocks


# --- pieces -----------------------------------------------------------------------------------------------------------


def _half(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def _to_half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def _parts(d, dmin=None, scales=None, mins=None, codes=None, negative=None) -> Parts:
    rows, blocks = d.shape
    one = np.ones((rows, blocks, 1), np.int32)
    return Parts(
        d,
        np.zeros_like(d) if dmin is None else dmin,
        one if scales is None else scales.astype(np.int32),
        np.zeros_like(one if scales is None else scales, np.int32) if mins is None else mins.astype(np.int32),
        codes.reshape(rows, -1).astype(np.int32),
        np.zeros((rows, 0), bool) if negative is None else negative.reshape(rows, -1),
    )


def _nibbles(qs: np.ndarray, half: int) -> np.ndarray:
    """As `pack.pack_nibbles` lays them out: [..., bytes] -> [..., 2 * bytes]."""
    q = qs.reshape(*qs.shape[:-1], -1, half)
    return np.stack([q & 15, q >> 4], -2).reshape(*qs.shape[:-1], -1)


def _to_nibbles(codes: np.ndarray, half: int) -> np.ndarray:
    c = codes.reshape(*codes.shape[:-1], -1, 2, half)
    return (c[..., 0, :] | c[..., 1, :] << 4).reshape(*codes.shape[:-1], -1).astype(np.uint8)


def _crumbs(qs: np.ndarray) -> np.ndarray:
    """As `pack.pack_crumbs`: [..., bytes] -> [..., 4 * bytes]."""
    q = qs.reshape(*qs.shape[:-1], -1, 32)
    return np.stack([q >> 2 * k & 3 for k in range(4)], -2).reshape(*qs.shape[:-1], -1)


def _joined(fields: Iterable[np.ndarray]) -> np.ndarray:
    """Bit fields that do not overlap, in one number."""
    return reduce(np.bitwise_or, fields)


def _to_crumbs(codes: np.ndarray) -> np.ndarray:
    c = codes.reshape(*codes.shape[:-1], -1, 4, 32)
    return _joined(c[..., k, :] << 2 * k for k in range(4)).reshape(*codes.shape[:-1], -1).astype(np.uint8)


def _plane(bits: np.ndarray) -> np.ndarray:
    """As `pack.pack_plane`: [..., 32] -> [..., 256]."""
    return np.stack([bits >> k & 1 for k in range(8)], -2).reshape(*bits.shape[:-1], -1)


def _to_plane(ones: np.ndarray) -> np.ndarray:
    c = ones.reshape(*ones.shape[:-1], 8, 32)
    return _joined(c[..., k, :] << k for k in range(8)).astype(np.uint8)


def _bits(bytes_: np.ndarray) -> np.ndarray:
    """Bit i of each byte: [..., n] -> [..., 8 n] of 0 and 1."""
    return np.unpackbits(bytes_, axis=-1, bitorder="little")


def _field(words: np.ndarray, shift: int, width: int) -> np.ndarray:
    return (words.astype(np.int64) >> shift) & ((1 << width) - 1)


# --- levels -----------------------------------------------------------------------------------------------------------


def _plain(name: str, fifth: bool = False, offset: bool = False) -> Callable[[], Layout]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: d, perhaps an offset, and codes in nibbles, perhaps with a fifth bit."""

    def take(b: np.ndarray) -> Parts:
        codes = _nibbles(b["qs"], 16).astype(np.int32)
        codes = codes | (_bits(b["qh"]).astype(np.int32) << 4) if fifth else codes
        d = _half(b["d"])
        if not offset:
            return _parts(d, codes=codes)
        minus = np.full((*d.shape, 1), -1)
        return _parts(d, _half(b["m"]), np.ones_like(minus), minus, codes)

    def put(p: Parts, b: np.ndarray) -> None:
        codes = p.codes.reshape(*b.shape, 32)
        b["d"], b["qs"] = _to_half(p.d), _to_nibbles(codes & 15, 16)
        if fifth:
            b["qh"] = np.packbits((codes >> 4).astype(np.uint8), axis=-1, bitorder="little")
        if offset:
            b["m"] = _to_half(p.dmin)

    n = 32 if fifth else 16
    levels = IQ4_VALUES if name == "IQ4_NL" else np.arange(n) - (0 if offset else n // 2)
    return lambda: Layout(name, 32, 32, take, put, offset=offset, levels=levels.astype(np.float32))


def _mxfp4() -> Layout:
    from quant.formats.mxfp4 import half_scale

    values = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
    levels = np.concatenate([-values[:0:-1], values])  # ascending; code of the format -> its place, -0 as 0
    place = np.array([7, 8, 9, 10, 11, 12, 13, 14, 7, 6, 5, 4, 3, 2, 1, 0])
    code = np.array([15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7])
    scale = np.array([half_scale(e) for e in range(256)], np.float32)

    def take(b: np.ndarray) -> Parts:
        return _parts(scale[b["e"]], codes=place[_nibbles(b["qs"], 16)])

    def put(p: Parts, b: np.ndarray) -> None:
        b["e"] = np.searchsorted(scale[:255], p.d).clip(0, 254)
        b["qs"] = _to_nibbles(code[p.codes.reshape(*b.shape, 32)], 16)

    return Layout("MXFP4", 32, 32, take, put, levels=levels, rounding=POWER)


def _q2_k() -> Layout:
    def take(b: np.ndarray) -> Parts:
        return _parts(_half(b["d"]), _half(b["dmin"]), b["scales"] & 15, b["scales"] >> 4, _crumbs(b["qs"]))

    def put(p: Parts, b: np.ndarray) -> None:
        b["d"], b["dmin"], b["scales"] = _to_half(p.d), _to_half(p.dmin), p.scales | p.mins << 4
        b["qs"] = _to_crumbs(p.codes.reshape(*b.shape, 256))

    return Layout("Q2_K", 16, 256, take, put, (0, 15), mins=(0, 15), levels=np.arange(4, dtype=np.float32))


def _q3_k() -> Layout:
    def take(b: np.ndarray) -> Parts:
        s = b["scales"].astype(np.int32)
        low = np.concatenate([s[..., :8] & 15, s[..., :8] >> 4], -1)
        high = np.concatenate([s[..., 8:] >> 2 * k & 3 for k in range(4)], -1)
        return _parts(_half(b["d"]), scales=(low | high << 4) - 32, codes=_crumbs(b["qs"]) | (_plane(b["hmask"]) << 2))

    def put(p: Parts, b: np.ndarray) -> None:
        codes, s = p.codes.reshape(*b.shape, 256), p.scales + 32
        b["d"], b["qs"], b["hmask"] = _to_half(p.d), _to_crumbs(codes & 3), _to_plane(codes >> 2)
        low = (s[..., :8] & 15) | (s[..., 8:] & 15) << 4
        high = _joined((s[..., 4 * k : 4 * k + 4] >> 4) << 2 * k for k in range(4))
        b["scales"] = np.concatenate([low, high], -1)

    return Layout("Q3_K", 16, 256, take, put, (-32, 31), levels=np.arange(-4, 4, dtype=np.float32))


def _q45_k(name: str, fifth: bool) -> Callable[[], Layout]:
    def take(b: np.ndarray) -> Parts:
        s = b["scales"].astype(np.int32)
        top, mid, low = s[..., :4], s[..., 4:8], s[..., 8:]
        scales = np.concatenate([top & 63, low & 15 | (top >> 6) << 4], -1)
        mins = np.concatenate([mid & 63, low >> 4 | (mid >> 6) << 4], -1)
        codes = _nibbles(b["qs"], 32)
        codes = codes | _plane(b["qh"]) << 4 if fifth else codes
        return _parts(_half(b["d"]), _half(b["dmin"]), scales, mins, codes)

    def put(p: Parts, b: np.ndarray) -> None:
        codes, s, m = p.codes.reshape(*b.shape, 256), p.scales, p.mins
        b["d"], b["dmin"], b["qs"] = _to_half(p.d), _to_half(p.dmin), _to_nibbles(codes & 15, 32)
        top, mid = s[..., :4] | (s[..., 4:] >> 4) << 6, m[..., :4] | (m[..., 4:] >> 4) << 6
        b["scales"] = np.concatenate([top, mid, (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4], -1)
        if fifth:
            b["qh"] = _to_plane(codes >> 4)

    levels = np.arange(32 if fifth else 16, dtype=np.float32)
    return lambda: Layout(name, 32, 256, take, put, (0, 63), mins=(0, 63), levels=levels)


def _q6_k() -> Layout:
    def take(b: np.ndarray) -> Parts:
        low = _nibbles(b["ql"], 64)
        return _parts(_half(b["d"]), scales=b["scales"], codes=low | _crumbs(b["qh"]) << 4)

    def put(p: Parts, b: np.ndarray) -> None:
        codes = p.codes.reshape(*b.shape, 256)
        b["d"], b["scales"] = _to_half(p.d), p.scales
        b["ql"], b["qh"] = _to_nibbles(codes & 15, 64), _to_crumbs(codes >> 4)

    return Layout("Q6_K", 16, 256, take, put, (-128, 127), levels=np.arange(-32, 32, dtype=np.float32))


def _iq4_xs() -> Layout:
    def take(b: np.ndarray) -> Parts:
        low = np.stack([b["scales_l"] & 15, b["scales_l"] >> 4], -1).reshape(*b.shape, 8)
        high = np.stack([b["scales_h"] >> 2 * g & 3 for g in range(8)], -1)
        scales = (low | (high << 4)).astype(np.int32) - 32
        return _parts(_half(b["d"]), scales=scales, codes=_nibbles(b["qs"], 16))

    def put(p: Parts, b: np.ndarray) -> None:
        s = p.scales + 32
        b["d"], b["qs"] = _to_half(p.d), _to_nibbles(p.codes.reshape(*b.shape, 256), 16)
        b["scales_l"] = (s[..., ::2] & 15) | (s[..., 1::2] & 15) << 4
        b["scales_h"] = _joined((s[..., g] >> 4) << 2 * g for g in range(8))

    return Layout("IQ4_XS", 32, 256, take, put, (-32, 31), levels=IQ4_VALUES.astype(np.float32))


# --- points -----------------------------------------------------------------------------------------------------------

_IQ2_LEVELS = np.array([8, 25, 43, 0], np.float32) / 8
_IQ3_XXS_LEVELS = np.array([4, 12, 20, 28, 36, 44, 52, 62], np.float32) / 4
_IQ3_S_LEVELS = np.arange(1, 16, 2).astype(np.float32)
_TERNARY = np.array([-1, 0, 1, 0], np.float32)


def _book(name: str, levels: np.ndarray) -> Callable[[], np.ndarray]:
    def points() -> np.ndarray:
        book = CODEBOOKS[name]
        shifts = book.bits * np.arange(book.dims)
        return levels[(book.codes[:, None].astype(np.int64) >> shifts) & ((1 << book.bits) - 1)]

    return points


def _even_bits(code: np.ndarray) -> np.ndarray:
    """7-bit sign codes -> 8 sign bits with an even number of ones: [...] -> [..., 8]."""
    low = code[..., None].astype(np.int64) >> np.arange(7) & 1
    return np.concatenate([low, low.sum(-1, keepdims=True) & 1], -1).astype(bool)


def _sign_codes(negative: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Bit i of a byte per 8 weights: [blocks..., 32]."""
    return np.packbits(negative.reshape(*b.shape, 32, 8), axis=-1, bitorder="little")[..., 0].astype(np.int64)


def _pair_scales(b: np.ndarray) -> np.ndarray:
    return np.stack([b["scales"] & 15, b["scales"] >> 4], -1).reshape(*b.shape, -1)


def _to_pair_scales(s: np.ndarray) -> np.ndarray:
    return s[..., ::2] | s[..., 1::2] << 4


def _iq2_xxs() -> Layout:
    def take(b: np.ndarray) -> Parts:
        index, word = b["qs"][..., 0], b["qs"][..., 1]
        codes = np.stack([_field(index, 8 * k, 8) for k in range(4)], -1)
        signs = _even_bits(np.stack([_field(word, 7 * k, 7) for k in range(4)], -1))
        return _parts(_half(b["d"]), scales=_field(word, 28, 4), codes=codes, negative=signs)

    def put(p: Parts, b: np.ndarray) -> None:
        codes = p.codes.reshape(*b.shape, 8, 4).astype(np.int64)
        signs = _sign_codes(p.negative, b).reshape(*b.shape, 8, 4) & 127
        b["d"] = _to_half(p.d)
        b["qs"][..., 0] = _joined(codes[..., k] << 8 * k for k in range(4))
        b["qs"][..., 1] = _joined(signs[..., k] << 7 * k for k in range(4)) | p.scales.astype(np.int64) << 28

    return Layout("IQ2_XXS", 32, 256, take, put, (0, 15), True, points=_book("IQ2_XXS", _IQ2_LEVELS), signs=EVEN)


def _iq2_xs() -> Layout:
    def take(b: np.ndarray) -> Parts:
        codes, signs = b["qs"] & 511, _even_bits(b["qs"] >> 9)
        return _parts(_half(b["d"]), scales=_pair_scales(b), codes=codes, negative=signs)

    def put(p: Parts, b: np.ndarray) -> None:
        b["d"], b["scales"] = _to_half(p.d), _to_pair_scales(p.scales)
        b["qs"] = p.codes.reshape(*b.shape, 32) | (_sign_codes(p.negative, b) & 127) << 9

    return Layout("IQ2_XS", 16, 256, take, put, (0, 15), True, points=_book("IQ2_XS", _IQ2_LEVELS), signs=EVEN)


def _iq2_s() -> Layout:
    def take(b: np.ndarray) -> Parts:
        high = np.stack([b["qh"] >> 2 * k & 3 for k in range(4)], -1).reshape(*b.shape, 32)
        codes = b["qs"] | high.astype(np.int32) << 8
        return _parts(_half(b["d"]), scales=_pair_scales(b), codes=codes, negative=_bits(b["signs"]).astype(bool))

    def put(p: Parts, b: np.ndarray) -> None:
        codes = p.codes.reshape(*b.shape, 8, 4)
        b["d"], b["scales"] = _to_half(p.d), _to_pair_scales(p.scales)
        b["qs"], b["signs"] = codes.reshape(*b.shape, 32) & 255, _sign_codes(p.negative, b)
        b["qh"] = _joined((codes[..., k] >> 8) << 2 * k for k in range(4))

    return Layout("IQ2_S", 16, 256, take, put, (0, 15), True, points=_book("IQ2_S", _IQ2_LEVELS), signs=FREE)


def _iq3_xxs() -> Layout:
    def take(b: np.ndarray) -> Parts:
        signs = _even_bits(np.stack([_field(b["signs"], 7 * k, 7) for k in range(4)], -1))
        return _parts(_half(b["d"]), scales=_field(b["signs"], 28, 4), codes=b["qs"], negative=signs)

    def put(p: Parts, b: np.ndarray) -> None:
        signs = _sign_codes(p.negative, b).reshape(*b.shape, 8, 4) & 127
        b["d"], b["qs"] = _to_half(p.d), p.codes.reshape(*b.shape, 64)
        b["signs"] = _joined(signs[..., k] << 7 * k for k in range(4)) | p.scales.astype(np.int64) << 28

    return Layout("IQ3_XXS", 32, 256, take, put, (0, 15), True, points=_book("IQ3_XXS", _IQ3_XXS_LEVELS), signs=EVEN)


def _iq3_s() -> Layout:
    def take(b: np.ndarray) -> Parts:
        codes = b["qs"] | _bits(b["qh"]).astype(np.int32) << 8
        return _parts(_half(b["d"]), scales=_pair_scales(b), codes=codes, negative=_bits(b["signs"]).astype(bool))

    def put(p: Parts, b: np.ndarray) -> None:
        codes = p.codes.reshape(*b.shape, 64)
        b["d"], b["scales"] = _to_half(p.d), _to_pair_scales(p.scales)
        b["qs"], b["signs"] = codes & 255, _sign_codes(p.negative, b)
        b["qh"] = np.packbits((codes >> 8).astype(np.uint8), axis=-1, bitorder="little")

    return Layout("IQ3_S", 32, 256, take, put, (0, 15), True, points=_book("IQ3_S", _IQ3_S_LEVELS), signs=FREE)


_IQ1_SHIFT = np.float32(0.125)


def _iq1_points() -> np.ndarray:
    """The points with the shift added, and then all of them with it subtracted."""
    q = _book("IQ1_S", _TERNARY)()
    return np.concatenate([q + _IQ1_SHIFT, q - _IQ1_SHIFT])


def _iq1_s() -> Layout:
    def take(b: np.ndarray) -> Parts:
        h = b["qh"].astype(np.int32)
        high = np.stack([h >> 3 * k & 7 for k in range(4)], -1)
        codes = b["qs"].reshape(*b.shape, 8, 4) | high << 8 | ((h >> 15) << 11)[..., None]
        return _parts(_half(b["d"]), scales=h >> 12 & 7, codes=codes, negative=np.zeros((*b.shape, 256), bool))

    def put(p: Parts, b: np.ndarray) -> None:
        codes = p.codes.reshape(*b.shape, 8, 4)
        b["d"], b["qs"] = _to_half(p.d), codes.reshape(*b.shape, 32) & 255
        high = _joined((codes[..., k] >> 8 & 7) << 3 * k for k in range(4))
        b["qh"] = high | p.scales << 12 | (codes[..., 0] >> 11) << 15

    return Layout("IQ1_S", 32, 256, take, put, (0, 7), True, points=_iq1_points, sets=2)


def _iq1_m() -> Layout:
    def take(b: np.ndarray) -> Parts:
        words = b["scales"].astype(np.int32)
        bits = _joined((words[..., g] >> 12) << 4 * g for g in range(4)).astype(np.uint16)
        scales = np.stack([words >> 3 * k & 7 for k in range(4)], -1).reshape(*b.shape, 16)
        high = np.stack([b["qh"] & 15, b["qh"] >> 4], -1).reshape(*b.shape, 32).astype(np.int32)
        codes = b["qs"] | high << 8
        return _parts(_half(bits), scales=scales, codes=codes, negative=np.zeros((*b.shape, 256), bool))

    def put(p: Parts, b: np.ndarray) -> None:
        codes, scales = p.codes.reshape(*b.shape, 32), p.scales.reshape(*b.shape, 4, 4)
        bits = _to_half(p.d).astype(np.int32)
        b["qs"], high = codes & 255, codes >> 8
        b["qh"] = high[..., ::2] | high[..., 1::2] << 4
        words = _joined(scales[..., k] << 3 * k for k in range(4))
        b["scales"] = words | np.stack([(bits >> 4 * g & 15) << 12 for g in range(4)], -1)

    return Layout("IQ1_M", 16, 256, take, put, (0, 7), True, points=_iq1_points)


#: format -> what makes its layout
FORMATS_OF: dict[str, Callable[[], Layout]] = {
    "Q4_0": _plain("Q4_0"),
    "Q4_1": _plain("Q4_1", offset=True),
    "Q5_0": _plain("Q5_0", fifth=True),
    "Q5_1": _plain("Q5_1", fifth=True, offset=True),
    "IQ4_NL": _plain("IQ4_NL"),
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q45_k("Q4_K", fifth=False),
    "Q5_K": _q45_k("Q5_K", fifth=True),
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
