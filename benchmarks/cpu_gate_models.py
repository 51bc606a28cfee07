"""Well-known models of torchvision, timm and transformers with random weights: what `cpu_gate.py` plans and runs.

Nothing is downloaded. `MODELS[name]()` returns the module in eval mode and its example inputs at batch 1. Image models
have their published size unless the name says otherwise; transformers are small configurations.

torchvision's wheel for a CPU-only torch lacks its compiled operators; their schemas are declared here so that it can be
imported. No model below uses them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
_TORCHVISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width)"
    " -> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h,"
    " SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups,"
    " SymInt offset_groups, bool use_mask) -> Tensor",
)
_library: list[torch.library.Library] = []


def _torchvision() -> Any:
    if not _library:
        try:
            import torchvision
        except RuntimeError:  # its operators are compiled for another torch
            _library.append(torch.library.Library("torchvision", "DEF"))
            for schema in _TORCHVISION_OPS:
                _library[0].define(schema)
    import torchvision

    return torchvision


def _transformers() -> Any:
    _torchvision()  # some models of transformers import it
    import transformers

    return transformers


class _Pick(nn.Module):
    """A model of which only some outputs are wanted, as a tuple of tensors; `fixed` are further keyword arguments."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Any], **fixed: Any) -> None:
        super().__init__()
        self.model, self.pick, self.fixed = model, pick, fixed

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.pick(self.model(*inputs, **self.fixed))


def _image(size: int, channels: int = 3) -> torch.Tensor:
    return torch.rand(1, channels, size, size, generator=torch.Generator().manual_seed(1))


def _tokens(length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(1))


def _vision(name: str, size: int = 224, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        return getattr(_torchvision().models, name)(weights=None, **options).eval(), (_image(size),)

    return make


def _segmentation(name: str, size: int) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(_torchvision().models.segmentation, name)(weights=None, weights_backbone=None, aux_loss=False)
        return _Pick(made, lambda y: y["out"]).eval(), (_image(size),)

    return make


def _timm(name: str, size: int = 224) -> Callable[[], Made]:
    def make() -> Made:
        _torchvision()  # timm imports it
        import timm

        return timm.create_model(name, pretrained=False).eval(), (_image(size),)

    return make


def _first(result: Any) -> Any:
    return result[0]


def _transformer(name: str, config: str, length: int = 128, **sizes: Any) -> Callable[[], Made]:
    """A model of transformers by its class and configuration; its first result for one sequence of tokens."""

    def make() -> Made:
        transformers = _transformers()
        made = getattr(transformers, config)(**sizes)
        made._attn_implementation = "eager"
        model = getattr(transformers, name)(made)
        return _Pick(model, _first, return_dict=False, **_no_cache(made)).eval(), (_tokens(length, made.vocab_size),)

    return make


def _no_cache(config: Any) -> dict[str, Any]:
    return {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}


class _Encoded(nn.Module):
    """An encoder-decoder of transformers as a function of both token sequences."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(input_ids=source, decoder_input_ids=target, use_cache=False, return_dict=False)[
            0
        ]
        return out


def _encoder_decoder(name: str, config: str, length: int = 64, **sizes: Any) -> Callable[[], Made]:
    def make() -> Made:
        transformers = _transformers()
        made = getattr(transformers, config)(**sizes)
        made._attn_implementation = "eager"
        model = getattr(transformers, name)(made)
        return _Encoded(model).eval(), (_tokens(length, made.vocab_size), _tokens(length // 2, made.vocab_size))

    return make


class UNet(nn.Module):
    """The U-shaped network of Ronneberger et al. (2015) with padded convolutions and batch norm, four levels."""

    def __init__(self, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList(self._block(c, w) for c, w in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.join = nn.ModuleList(self._block(2 * w, w) for w in widths[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Sequential:
        layers = [
            m for c in (inner, outer) for m in (nn.Conv2d(c, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())
        ]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for up, join, skip in list(zip(self.up, self.join, skips, strict=False))[::-1]:
            x = join(torch.cat([up(x), skip], dim=1))
        out: torch.Tensor = self.head(x)
        return out


class Recurrent(nn.Module):
    """An embedding, a recurrent layer over the sequence, and a classifier of its last state."""

    def __init__(self, cell: type[nn.RNNBase], width: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.cell = cell(width, width, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(width * (1 + bidirectional), 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.cell(self.embed(tokens))
        out: torch.Tensor = self.head(states[:, -1])
        return out


class KeywordSpotter(nn.Module):
    """One-dimensional convolutions over 16,000 samples of sound (M5, Dai et al. 2017)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv1d(1, width, 80, stride=4), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4)]
        for a, b in ((width, width), (width, 2 * width), (2 * width, 4 * width)):
            parts += [nn.Conv1d(a, b, 3), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(4)]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(4 * width, 35)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(sound).mean(dim=-1)).log_softmax(dim=-1)
        return out


def _plain(make: Callable[[], nn.Module], *inputs: Callable[[], torch.Tensor]) -> Callable[[], Made]:
    return lambda: (make().eval(), tuple(i() for i in inputs))


_SMALL_BERT = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)

_MODELS: dict[str, Callable[[], Made]] = {
    "resnet18": _vision("resnet18"),
    "resnet34": _vision("resnet34"),
    "resnet101": _vision("resnet101"),
    "wide_resnet50_2": _vision("wide_resnet50_2"),
    "resnext50_32x4d": _vision("resnext50_32x4d"),
    "alexnet": _vision("alexnet"),
    "vgg11": _vision("vgg11"),
    "vgg16_bn": _vision("vgg16_bn"),
    "densenet121": _vision("densenet121"),
    "googlenet": _vision("googlenet", init_weights=False, aux_logits=False),
    "squeezenet1_1": _vision("squeezenet1_1"),
    "shufflenet_v2_x1_0": _vision("shufflenet_v2_x1_0"),
    "mobilenet_v2": _vision("mobilenet_v2"),
    "mobilenet_v3_small": _vision("mobilenet_v3_small"),
    "mnasnet1_0": _vision("mnasnet1_0"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "efficientnet_v2_s": _vision("efficientnet_v2_s"),
    "regnet_y_400mf": _vision("regnet_y_400mf"),
    "regnet_x_1_6gf": _vision("regnet_x_1_6gf"),
    "swin_t": _vision("swin_t"),
    "swin_v2_t": _vision("swin_v2_t", 256),
    "maxvit_t": _vision("maxvit_t"),
    "convnext_small": _vision("convnext_small"),
    "vit_b_32": _vision("vit_b_32"),
    "fcn_resnet50": _segmentation("fcn_resnet50", 128),
    "deeplabv3_mobilenet": _segmentation("deeplabv3_mobilenet_v3_large", 224),
    "lraspp_mobilenet": _segmentation("lraspp_mobilenet_v3_large", 224),
    "vit_tiny": _timm("vit_tiny_patch16_224"),
    "deit_small": _timm("deit_small_patch16_224"),
    "mixer_s32": _timm("mixer_s32_224"),
    "resmlp_12": _timm("resmlp_12_224"),
    "gmixer_24": _timm("gmixer_24_224"),
    "convmixer": _timm("convmixer_768_32"),
    "poolformer_s12": _timm("poolformer_s12"),
    "xcit_nano": _timm("xcit_nano_12_p16_224"),
    "cait_xxs24": _timm("cait_xxs24_224"),
    "edgenext_xs": _timm("edgenext_x_small"),
    "mobilevit_xs": _timm("mobilevit_xs", 256),
    "repvgg_a0": _timm("repvgg_a0"),
    "ghostnet": _timm("ghostnet_100"),
    "nfnet_l0": _timm("nfnet_l0"),
    "hrnet_w18_small": _timm("hrnet_w18_small"),
    "dla34": _timm("dla34"),
    "levit_128": _timm("levit_128"),
    "inception_v4": _timm("inception_v4", 299),
    "xception41": _timm("xception41", 299),
    "res2net50": _timm("res2net50_26w_4s"),
    "volo_d1": _timm("volo_d1_224"),
    "beit_base": _timm("beit_base_patch16_224"),
    "eva02_tiny": _timm("eva02_tiny_patch14_224"),
    "tf_efficientnet_lite0": _timm("tf_efficientnet_lite0"),
    "distilbert": _transformer("DistilBertModel", "DistilBertConfig", dim=384, n_layers=4, n_heads=6, hidden_dim=1536),
    "albert": _transformer("AlbertModel", "AlbertConfig", **_SMALL_BERT, embedding_size=128),
    "roberta": _transformer("RobertaModel", "RobertaConfig", **_SMALL_BERT),
    "electra": _transformer("ElectraModel", "ElectraConfig", **_SMALL_BERT, embedding_size=128),
    "deberta_v2": _transformer("DebertaV2Model", "DebertaV2Config", **_SMALL_BERT),
    "mpnet": _transformer("MPNetModel", "MPNetConfig", **_SMALL_BERT),
    "mobilebert": _transformer("MobileBertModel", "MobileBertConfig", num_hidden_layers=6),
    "funnel": _transformer(
        "FunnelBaseModel", "FunnelConfig", d_model=256, n_head=4, d_head=64, d_inner=1024, block_sizes=[2, 2]
    ),
    "fnet": _transformer("FNetModel", "FNetConfig", hidden_size=256, num_hidden_layers=4, intermediate_size=1024),
    "xlnet": _transformer("XLNetModel", "XLNetConfig", d_model=256, n_layer=4, n_head=4, d_inner=1024),
    "gpt2_tiny": _transformer("GPT2LMHeadModel", "GPT2Config", n_embd=256, n_layer=4, n_head=4, vocab_size=8000),
    "gpt_neo": _transformer(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        vocab_size=8000,
    ),
    "gpt_neox": _transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SMALL_BERT, vocab_size=8000),
    "opt": _transformer(
        "OPTForCausalLM",
        "OPTConfig",
        hidden_size=256,
        num_hidden_layers=4,
        ffn_dim=1024,
        num_attention_heads=4,
        word_embed_proj_dim=256,
        vocab_size=8000,
    ),
    "bloom": _transformer("BloomForCausalLM", "BloomConfig", hidden_size=256, n_layer=4, n_head=4, vocab_size=8000),
    "llama": _transformer("LlamaForCausalLM", "LlamaConfig", **_SMALL_BERT, num_key_value_heads=2, vocab_size=8000),
    "mistral": _transformer(
        "MistralForCausalLM", "MistralConfig", **_SMALL_BERT, num_key_value_heads=2, vocab_size=8000
    ),
    "qwen2": _transformer("Qwen2ForCausalLM", "Qwen2Config", **_SMALL_BERT, num_key_value_heads=2, vocab_size=8000),
    "gemma": _transformer(
        "GemmaForCausalLM", "GemmaConfig", **_SMALL_BERT, head_dim=64, num_key_value_heads=1, vocab_size=8000
    ),
    "phi": _transformer("PhiForCausalLM", "PhiConfig", **_SMALL_BERT, vocab_size=8000),
    "falcon": _transformer(
        "FalconForCausalLM",
        "FalconConfig",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=8000,
    ),
    "t5_tiny": _encoder_decoder(
        "T5Model", "T5Config", d_model=256, d_ff=1024, num_layers=3, num_heads=4, d_kv=64, vocab_size=8000
    ),
    "bart": _encoder_decoder(
        "BartModel",
        "BartConfig",
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        vocab_size=8000,
    ),
    "unet": _plain(UNet, lambda: _image(128)),
    "lstm_short": _plain(lambda: Recurrent(nn.LSTM, 128), lambda: _tokens(16, 1000)),
    "gru_short": _plain(lambda: Recurrent(nn.GRU, 128), lambda: _tokens(16, 1000)),
    "bilstm": _plain(lambda: Recurrent(nn.LSTM, 128, bidirectional=True), lambda: _tokens(16, 1000)),
    "keyword_m5": _plain(KeywordSpotter, lambda: torch.rand(1, 1, 16000)),
}
#: Chosen when the models above had been looked at, and before any of these was run: run once, afterwards.
_LATER: dict[str, Callable[[], Made]] = {
    **{
        name: _timm(name)
        for name in (
            "densenet169", "vgg13", "mobilenetv2_140", "tinynet_a", "cspresnet50", "darknet53", "hardcorenas_a",
            "selecsls42b", "ese_vovnet19b_dw", "pit_ti_224", "visformer_tiny", "twins_pcpvt_small", "pvt_v2_b0",
            "gcresnext26ts", "regnetx_002", "fbnetc_100", "mixnet_s", "rexnet_100", "skresnet18", "semnasnet_100",
            "lcnet_100", "resnest14d", "convnextv2_atto", "repghostnet_100", "mobilevitv2_050", "coat_tiny",
            "tf_mobilenetv3_large_075", "seresnet33ts", "efficientformer_l1", "fastvit_t8",
        )
    },
    "stablelm": _transformer(
        "StableLmForCausalLM", "StableLmConfig", **_SMALL_BERT, num_key_value_heads=4, vocab_size=8000
    ),
    "olmo": _transformer("OlmoForCausalLM", "OlmoConfig", **_SMALL_BERT, vocab_size=8000),
    "starcoder2": _transformer(
        "Starcoder2ForCausalLM", "Starcoder2Config", **_SMALL_BERT, num_key_value_heads=2, vocab_size=8000
    ),
    "gptj": _transformer(
        "GPTJForCausalLM", "GPTJConfig", n_embd=256, n_layer=4, n_head=4, rotary_dim=32, vocab_size=8000
    ),
    "phi3": _transformer(
        "Phi3ForCausalLM", "Phi3Config", **_SMALL_BERT, num_key_value_heads=4, vocab_size=8000, pad_token_id=0
    ),
    "camembert": _transformer("CamembertModel", "CamembertConfig", **_SMALL_BERT),
}  # fmt: skip
_MODELS |= _LATER
#: Chosen when those had been looked at, too, and before any of these was run.
_LATEST: dict[str, Callable[[], Made]] = {
    **{
        name: _timm(name)
        for name in (
            "resnet26d", "ecaresnet50t", "gernet_s", "dpn48b", "efficientnet_es", "mobileone_s0", "repvit_m0_9",
            "ghostnetv2_100", "convit_tiny", "deit3_small_patch16_224", "tnt_s_patch16_224", "gcvit_xxtiny",
            "nest_tiny", "poolformerv2_s12", "inception_next_atto", "levit_128s", "mnasnet_small",
            "hrnet_w18_small_v2", "resnext26ts", "xcit_tiny_12_p16_224", "mobilenetv4_conv_small", "regnety_004",
            "regnetz_005", "efficientvit_b0", "starnet_s1", "swiftformer_xs", "fasternet_t0", "visformer_small",
            "resnetv2_50", "hgnetv2_b0", "rdnet_tiny", "mambaout_femto",
        )
    },
    "codegen": _transformer(
        "CodeGenForCausalLM", "CodeGenConfig", n_embd=256, n_layer=4, n_head=4, rotary_dim=32, vocab_size=8000
    ),
    "mpt": _transformer("MptForCausalLM", "MptConfig", d_model=256, n_layers=4, n_heads=4, vocab_size=8000),
    "gpt_bigcode": _transformer(
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig", n_embd=256, n_layer=4, n_head=4, vocab_size=8000
    ),
    "granite": _transformer(
        "GraniteForCausalLM", "GraniteConfig", **_SMALL_BERT, num_key_value_heads=2, vocab_size=8000
    ),
    "olmo2": _transformer("Olmo2ForCausalLM", "Olmo2Config", **_SMALL_BERT, vocab_size=8000),
    "qwen3": _transformer(
        "Qwen3ForCausalLM", "Qwen3Config", **_SMALL_BERT, head_dim=64, num_key_value_heads=2, vocab_size=8000
    ),
    "xlm_roberta": _transformer("XLMRobertaModel", "XLMRobertaConfig", **_SMALL_BERT),
    "squeezebert": _transformer("SqueezeBertModel", "SqueezeBertConfig", **_SMALL_BERT, embedding_size=256),
}  # fmt: skip
_MODELS |= _LATEST


def get(name: str) -> Made:
    """Return the module called `name`, its weights drawn from seed 0, and its example inputs."""
    torch.manual_seed(0)
    module, inputs = _MODELS[name]()
    for value in module.parameters():
        if value.dim() > 1 and not value.any():  # a head that begins at 0 would make every result 0
            nn.init.normal_(value, std=0.02)
    return module, inputs


NAMES = tuple(_MODELS)
LATER, LATEST = tuple(_LATER), tuple(_LATEST)
