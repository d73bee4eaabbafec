"""Number formats of checkpoints. Tensors are packed here number by number, from the published layouts, and the weights
that they must give are worked out from the numbers that were packed."""

import json
import math

import numpy as np
import pytest

from gguftools.conversion.sources import METHODS, logical
from gguftools.errors import GGUFError
from gguftools.safetensors import open_checkpoint

N_OUT, N = 48, 96
RNG = np.random.default_rng(9)


def save(path, tensors):
    """A safetensors file by hand: name -> (type, array)."""
    header, at = {}, 0
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for _, x in tensors.values()))


def read(folder, tensors, settings, **files):
    folder.mkdir(exist_ok=True)
    save(folder / "model.safetensors", tensors)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    config = {"quantization_config": settings} if settings is not None else {}
    return logical(open_checkpoint(folder).values(), config, folder)


def check(rows, expected, atol=0.0):
    """All rows, and pieces that begin and end in the middle of words, blocks and groups."""
    assert rows.shape == expected.shape
    expected = expected.reshape(-1, expected.shape[-1])
    for lo, hi in ((0, len(expected)), (0, 1), (5, 6), (7, 33), (31, 32), (len(expected) - 3, len(expected))):
        np.testing.assert_allclose(rows.read(lo, hi), expected[lo:hi], rtol=1e-6, atol=atol)


def bfloat(x):
    return "BF16", (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def unbfloat(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# --- 8-bit floats -----------------------------------------------------------------------------------------------------


def e4m3(code):
    """OCP E4M3: bias 7, no infinity; S.1111.111 is NaN."""
    code = int(code)
    sign, exponent, mantissa = -1 if code >> 7 else 1, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e5m2(code):
    """OCP E5M2: bias 15, infinities and NaN as in IEEE 754."""
    code = int(code)
    sign, exponent, mantissa = -1 if code >> 7 else 1, (code >> 2) & 31, code & 3
    if exponent == 31:
        return math.nan if mantissa else sign * math.inf
    return sign * (mantissa / 4 * 2**-14 if exponent == 0 else (1 + mantissa / 4) * 2.0 ** (exponent - 15))


FLOATS = {"F8_E4M3": e4m3, "F8_E5M2": e5m2}


def float8(dtype, shape):
    """Random codes of finite numbers, and the numbers."""
    value = FLOATS[dtype]
    codes = RNG.choice([c for c in range(256) if math.isfinite(value(c))], shape).astype(np.uint8)
    return codes, np.vectorize(value)(codes).astype(np.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_codes_of_8_bit_floats(tmp_path, dtype):
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    rows = read(tmp_path, {"w": (dtype, codes)}, None)["w"]
    np.testing.assert_array_equal(rows.read(0, 16), np.vectorize(FLOATS[dtype])(codes).astype(np.float32))


SCALES = {  # what -> (shape of scales, block, index of the scale of (row, column))
    "tensor": ((1,), None, lambda r, c: (0,)),
    "scalar": ((), None, lambda r, c: ()),
    "channel": ((N_OUT,), None, lambda r, c: (r,)),
    "channel matrix": ((N_OUT, 1), None, lambda r, c: (r, 0)),
    "block": ((3, 3), [16, 32], lambda r, c: (r // 16, c // 32)),
    "cropped block": ((2, 1), [40, 128], lambda r, c: (r // 40, 0)),
}


@pytest.mark.parametrize("what", SCALES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8(tmp_path, dtype, what):
    shape, block, at = SCALES[what]
    codes, values = float8(dtype, (N_OUT, N))
    scale = np.asarray(RNG.uniform(0.5, 2, shape), np.float32)
    expected = np.array([[values[r, c] * scale[at(r, c)] for c in range(N)] for r in range(N_OUT)])
    tensors = {"a.weight": (dtype, codes), "a.weight_scale_inv": ("F32", scale), "a.input_scale": ("F32", np.ones(1))}
    tensors["a.input_scale"] = ("F32", np.ones(1, np.float32))
    settings = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    found = read(tmp_path, tensors, settings)
    assert list(found) == ["a.weight"]
    check(found["a.weight"], expected)


def test_fp8_of_experts_in_one_tensor(tmp_path):
    codes, values = float8("F8_E4M3", (3, 32, 64))
    scale = RNG.uniform(0.5, 2, (3, 2, 2)).astype(np.float32)
    expected = values * np.repeat(np.repeat(scale, 16, 1), 32, 2)
    tensors = {"e.up": ("F8_E4M3", codes), "e.up_scale_inv": ("F32", scale)}
    check(read(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 32]})["e.up"], expected)


# --- four-bit floats --------------------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp4(code):
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def pairs(codes):
    """Codes [..., n] as bytes [..., n / 2], the first of a pair in the lower half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def test_mxfp4_keeps_its_bits(tmp_path):
    codes = RNG.integers(0, 16, (2, 24, 3, 32))
    exponents = RNG.integers(100, 140, (2, 24, 3)).astype(np.uint8)
    tensors = {"x.up_blocks": ("U8", pairs(codes)), "x.up_scales": ("U8", exponents)}
    rows = read(tmp_path, tensors, {"quant_method": "mxfp4"})["x.up"]
    assert rows.dtype == "MXFP4"
    expected = np.vectorize(fp4)(codes) * 2.0 ** (exponents.astype(int)[..., None] - 127)
    check(rows, expected.reshape(2, 24, 96))
    block = rows.fetch(0, 1)[0, 0]  # GGUF's layout: weight j in the lower half of byte j, j + 16 in the upper
    assert block["e"] == exponents[0, 0, 0]
    assert [q & 15 for q in block["qs"]] + [q >> 4 for q in block["qs"]] == codes[0, 0, 0].tolist()
    order = np.array([40, 3, 3, 17])
    np.testing.assert_array_equal(rows.pick(order), np.concatenate([rows.fetch(i, i + 1) for i in order]))


def nvfp4():
    codes = RNG.integers(0, 16, (N_OUT, N))
    scales, values = float8("F8_E4M3", (N_OUT, N // 16))
    return codes, scales, np.vectorize(fp4)(codes) * np.repeat(values, 16, 1)


def test_nvfp4_of_modelopt(tmp_path):
    codes, scales, values = nvfp4()
    tensors = {
        "a.weight": ("U8", pairs(codes)),
        "a.weight_scale": ("F8_E4M3", scales),
        "a.weight_scale_2": ("F32", np.array(0.03, np.float32)),
        "a.input_scale": ("F32", np.array(0.5, np.float32)),
    }
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    found = read(tmp_path, tensors, None, hf_quant_config=settings)
    assert list(found) == ["a.weight"]
    check(found["a.weight"], values * np.float32(0.03), 1e-7)


def test_fp8_of_modelopt(tmp_path):
    codes, values = float8("F8_E4M3", (N_OUT, N))
    tensors = {"a.weight": ("F8_E4M3", codes), "a.weight_scale": ("F32", np.array(0.3, np.float32))}
    check(read(tmp_path, tensors, {"quant_algo": "FP8"})["a.weight"], values * np.float32(0.3))


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def bit_stream(numbers, bits):
    """Numbers, lowest bits first, in as many 32-bit words as they fill."""
    stream = sum(int(v) << (bits * i) for i, v in enumerate(numbers))
    n_words = -(-bits * len(numbers) // 32)
    return [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(n_words)]


def signed(words):
    return np.array(words, np.uint32).view(np.int32)


def gptq(bits, order, less):
    groups = N // 32
    q = RNG.integers(0, 1 << bits, (N, N_OUT))
    zero = RNG.integers(1, 1 << bits, (groups, N_OUT))
    scale = RNG.uniform(0.01, 0.1, (groups, N_OUT)).astype(np.float16)
    group_of = RNG.permutation(np.arange(N) // 32) if order else np.arange(N) // 32
    expected = np.array(
        [
            [float(scale[group_of[i], o]) * (int(q[i, o]) - int(zero[group_of[i], o])) for i in range(N)]
            for o in range(N_OUT)
        ]
    )
    tensors = {
        "a.qweight": ("I32", signed([bit_stream(q[:, o], bits) for o in range(N_OUT)]).T.copy()),
        "a.qzeros": ("I32", signed([bit_stream(zero[g] - less, bits) for g in range(groups)])),
        "a.scales": ("F16", scale),
    }
    if order:
        tensors["a.g_idx"] = ("I32", group_of.astype(np.int32))
    return tensors, expected


@pytest.mark.parametrize("order", [False, True], ids=["in order", "g_idx"])
@pytest.mark.parametrize(("layout", "less"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(tmp_path, bits, layout, less, order):
    tensors, expected = gptq(bits, order, less)
    tensors |= {"z.weight": ("F32", np.ones((2, 2), np.float32)), "a.bias": ("F16", np.ones(N_OUT, np.float16))}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": layout}
    found = read(tmp_path, tensors, settings)
    assert set(found) == {"z.weight", "a.bias", "a.weight"}
    check(found["a.weight"], expected)


def test_three_bits_cross_words():
    """The published layout of 3 bits: number 10 has two bits in the first word and one in the second."""
    numbers = [0] * 10 + [0b101] + [0] * 21
    assert bit_stream(numbers, 3) == [0b01 << 30, 0b1, 0]


def test_settings_beside_the_config(tmp_path):
    tensors, expected = gptq(4, False, 1)
    found = read(tmp_path, tensors, None, quantize_config={"bits": 4, "group_size": 32})
    check(found["a.weight"], expected)


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ: output of the integer at bits 4 i


def awq_words(rows):
    words = [
        [sum(int(row[8 * w + AWQ_ORDER[i]]) << (4 * i) for i in range(8)) for w in range(len(row) // 8)] for row in rows
    ]
    return signed(words)


def test_awq(tmp_path):
    groups = N // 32
    q, zero = RNG.integers(0, 16, (N, N_OUT)), RNG.integers(0, 16, (groups, N_OUT))
    scale = RNG.uniform(0.01, 0.1, (groups, N_OUT)).astype(np.float16)
    tensors = {
        "a.qweight": ("I32", awq_words(q)),
        "a.qzeros": ("I32", awq_words(zero)),
        "a.scales": ("F16", scale),
    }
    g = np.arange(N) // 32
    expected = (scale.astype(np.float64)[g] * (q - zero[g])).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM", "zero_point": True}
    check(read(tmp_path, tensors, settings)["a.weight"], expected)


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_bitsandbytes_of_4_bits(tmp_path, kind, nested):
    table = np.sort(RNG.uniform(-1, 1, 16)).astype(np.float32)
    n_blocks = N_OUT * N // 64
    codes = RNG.integers(0, 16, N_OUT * N)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [N_OUT, N]}
    tensors = {
        "a.weight": ("U8", (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        "a.weight.quant_map": ("F32", table),
    }
    if nested:
        inner, outer = RNG.integers(0, 256, n_blocks).astype(np.uint8), RNG.uniform(1, 2, 3).astype(np.float32)
        map256 = np.linspace(-1, 1, 256, dtype=np.float32)
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors |= {
            "a.weight.absmax": ("U8", inner),
            "a.weight.nested_absmax": ("F32", outer),
            "a.weight.nested_quant_map": ("F32", map256),
        }
        absmax = [float(map256[inner[b]]) * float(outer[b // 32]) + 0.25 for b in range(n_blocks)]
    else:
        tensors["a.weight.absmax"] = ("F32", RNG.uniform(1, 2, n_blocks).astype(np.float32))
        absmax = tensors["a.weight.absmax"][1]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"a.weight.quant_state.bitsandbytes__{kind}"] = ("U8", text)
    expected = np.array([table[c] * absmax[i // 64] for i, c in enumerate(codes)]).reshape(N_OUT, N)
    found = read(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert list(found) == ["a.weight"]
    check(found["a.weight"], expected, 1e-6)


def test_bitsandbytes_of_8_bits(tmp_path):
    q, scb = RNG.integers(-127, 128, (N_OUT, N)).astype(np.int8), RNG.uniform(1, 9, N_OUT).astype(np.float32)
    tensors = {"a.weight": ("I8", q), "a.SCB": ("F32", scb), "a.weight_format": ("U8", np.zeros((), np.uint8))}
    found = read(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert list(found) == ["a.weight"]
    check(found["a.weight"], q * scb[:, None].astype(np.float64) / 127)


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def groups(format, *weights):
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {f"group_{i}": {"targets": ["Linear"], "weights": w} for i, w in enumerate(weights)},
    }


def test_compressed_floats(tmp_path):
    codes, values = float8("F8_E4M3", (N_OUT, N))
    scale, bits = RNG.uniform(0.5, 2, (N_OUT, 1)).astype(np.float32), None
    dtype, bits = bfloat(scale)
    tensors = {"a.weight": ("F8_E4M3", codes), "a.weight_scale": (dtype, bits)}
    settings = groups("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"})
    check(read(tmp_path, tensors, settings)["a.weight"], values * unbfloat(bits))


@pytest.mark.parametrize("zero", [False, True])
def test_compressed_int8(tmp_path, zero):
    q, scale = RNG.integers(-128, 128, (N_OUT, N)).astype(np.int8), RNG.uniform(0.5, 2, (N_OUT, 1)).astype(np.float32)
    points = RNG.integers(-9, 9, (N_OUT, 1)).astype(np.int8)
    tensors = {"a.weight": ("I8", q), "a.weight_scale": ("F32", scale)}
    if zero:
        tensors["a.weight_zero_point"] = ("I8", points)
    settings = groups("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})
    found = read(tmp_path, tensors, settings)
    assert list(found) == ["a.weight"]
    check(found["a.weight"], (q.astype(int) - zero * points) * scale.astype(np.float64))


def packed(rows, bits):
    """32 // bits integers in each word, the rest empty."""
    per = 32 // bits
    return signed(
        [
            [
                sum(int(v) << (bits * i) for i, v in enumerate(row[w * per : (w + 1) * per]))
                for w in range(-(-len(row) // per))
            ]
            for row in rows
        ]
    )


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compressed_packed_integers(tmp_path, bits, asymmetric):
    q = RNG.integers(0, 1 << bits, (N_OUT, N))
    scale = RNG.uniform(0.5, 2, (N_OUT, 3)).astype(np.float32)
    zero = RNG.integers(0, 1 << bits, (N_OUT, 3)) if asymmetric else np.full((N_OUT, 3), 1 << (bits - 1))
    tensors = {
        "a.weight_packed": ("I32", packed(q, bits)),
        "a.weight_scale": ("F32", scale),
        "a.weight_shape": ("I64", np.array([N_OUT, N])),
    }
    if asymmetric:
        tensors["a.weight_zero_point"] = ("I32", packed(zero.T, bits).T.copy())
    g = np.arange(N) // 32
    settings = groups("pack-quantized", {"num_bits": bits, "group_size": 32, "strategy": "group"})
    found = read(tmp_path, tensors, settings)
    assert list(found) == ["a.weight"]
    check(found["a.weight"], (q - zero[:, g]) * scale.astype(np.float64)[:, g])


def test_compressed_groups_of_different_widths(tmp_path):
    settings = groups("pack-quantized", {"num_bits": 4, "group_size": 32}, {"num_bits": 8, "group_size": -1})
    tensors, expected = {}, {}
    for name, bits, n_groups in (("a", 4, 3), ("b", 8, 1)):
        q, scale = RNG.integers(0, 1 << bits, (N_OUT, N)), RNG.uniform(0.5, 2, (N_OUT, n_groups)).astype(np.float32)
        tensors |= {
            f"{name}.weight_packed": ("I32", packed(q, bits)),
            f"{name}.weight_scale": ("F32", scale),
            f"{name}.weight_shape": ("I64", np.array([N_OUT, N])),
        }
        expected[name] = (q - (1 << (bits - 1))) * np.repeat(scale.astype(np.float64), N // n_groups, 1)
    found = read(tmp_path, tensors, settings)
    for name, values in expected.items():
        check(found[f"{name}.weight"], values)


def test_nvfp4_of_compressed_tensors(tmp_path):
    codes, scales, values = nvfp4()
    tensors = {
        "a.weight_packed": ("U8", pairs(codes)),
        "a.weight_scale": ("F8_E4M3", scales),
        "a.weight_global_scale": ("F32", np.array([32.5], np.float32)),
        "a.input_global_scale": ("F32", np.array([7], np.float32)),
    }
    settings = groups("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16})
    found = read(tmp_path, tensors, settings)
    assert list(found) == ["a.weight"]
    check(found["a.weight"], values / 32.5, 1e-7)


def test_mxfp4_of_compressed_tensors(tmp_path):
    codes, exponents = RNG.integers(0, 16, (N_OUT, N)), RNG.integers(120, 130, (N_OUT, 3)).astype(np.uint8)
    tensors = {"a.weight_packed": ("U8", pairs(codes)), "a.weight_scale": ("U8", exponents)}
    rows = read(tmp_path, tensors, groups("mxfp4-pack-quantized", {"num_bits": 4, "group_size": 32}))["a.weight"]
    assert rows.dtype == "MXFP4"
    check(rows, np.vectorize(fp4)(codes) * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 1))


# --- what cannot be read ----------------------------------------------------------------------------------------------


def without(tensors, name):
    return {n: t for n, t in tensors.items() if n != name}


def test_refusals(tmp_path):
    tensors, _ = gptq(4, True, 1)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    g_idx = tensors["a.g_idx"][1].copy()
    g_idx[3] = 77
    cases = [
        (without(tensors, "a.scales"), settings, "'a.scales' is missing"),
        (tensors | {"a.scales": ("F16", np.ones((3, 40), np.float16))}, settings, r"others need \[3, 48\]"),
        (tensors | {"a.g_idx": ("I32", g_idx)}, settings, "names group 77, there are 3"),
        (tensors | {"a.weight": ("F16", np.ones((2, 2), np.float16))}, settings, "there twice"),
        (without(tensors, "a.g_idx"), settings | {"group_size": 16}, "groups of 16 do not have 3 scales"),
        (tensors, settings | {"bits": 5}, "'bits' is 5, expected 2, 3, 4, 8"),
        (tensors, settings | {"checkpoint_format": "marlin"}, "'marlin'; gptq and gptq_v2 are read"),
        (tensors, {"quant_method": "exl3"}, "quantized by 'exl3'; fp8, .* convert the original model"),
        (tensors, "int4", "expected an object"),
        (tensors, {"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'; the layout gemm is read"),
        ({"a.weight": ("F8_E4M3", np.zeros((2, 2), np.uint8))}, {"quant_method": "fp8"}, "'a.weight' has no scales"),
        (tensors, groups("marlin-24", {"num_bits": 4}), "'format' is 'marlin-24'"),
        (tensors, {"quant_method": "compressed-tensors"}, "names no weights"),
    ]
    for i, (found, quantized, message) in enumerate(cases):
        with pytest.raises(GGUFError, match=message):
            read(tmp_path / str(i), found, quantized)


def test_scales_that_do_not_fit(tmp_path):
    tensors = {
        "a.weight": ("F8_E4M3", np.zeros((N_OUT, N), np.uint8)),
        "a.weight_scale_inv": ("F32", np.ones((5, 7), np.float32)),
    }
    with pytest.raises(GGUFError, match=r"\[5, 7\], which are no scales of \[48, 96\] in blocks of \[128, 128\]"):
        read(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def test_methods_have_rows_for_the_table():
    names = [name for method in METHODS for name in method.names]
    assert len(set(names)) == len(names)
    assert all(method.row for method in METHODS)
