# An excerpt of trl 1.16.0, trl.generation.vllm_generation: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _iter_named_params(self):
    model = self.model
    if is_peft_model(model):
        with self._dist.gather_params(list(model.parameters())):
            model.merge_adapter()
            if self._dist.is_fsdp:
                yield from self._iter_fsdp_params(model)
            else:
                for name, param in model.named_parameters():
                    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                    if model.prefix in name:
                        continue
                    if "original_module" in name:
                        continue
                    name = self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."])
                    yield (name, param.data)
            model.unmerge_adapter()
    elif self._dist.is_fsdp:
        yield from self._iter_fsdp_params(model)
    else:
        for name, param in model.named_parameters():
            name = self._fix_param_name_to_vllm(name)
            with self._dist.gather_params([param]):
                yield (name, param.data)
