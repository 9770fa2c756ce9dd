# An excerpt of transformers 5.23.0, transformers.utils.chat_template_utils: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _plain_template_data(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    elif isinstance(value, str):
        return str.__str__(value)
    elif isinstance(value, int):
        return int.__int__(value)
    elif isinstance(value, float):
        return float.__float__(value)
    elif isinstance(value, Mapping):
        return {_plain_template_data(key): _plain_template_data(item) for key, item in value.items()}
    elif isinstance(value, list):
        return [_plain_template_data(item) for item in value]
    elif isinstance(value, tuple):
        return tuple((_plain_template_data(item) for item in value))
    elif isinstance(value, np.generic):
        return _plain_template_data(value.item())
    elif dataclasses.is_dataclass(value) and (not isinstance(value, type)):
        return {field.name: _plain_template_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    elif callable(getattr(value, "model_dump", None)):
        return _plain_template_data(value.model_dump())
    else:
        return f"<{type(value).__name__}>"
