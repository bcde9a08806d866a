"""What the two reference engines share: a model family in this process, its tokenizer, its tensors by name.

May live here: loading a Hugging Face `transformers` causal LM from the model root, the plan between a model's
own tensors and the checkpoint's names, tokenization, and numerics that sampler and scorer must share.

May not live here: anything that one engine needs alone (batching, losses, optimizers), I/O beyond reading the
model folder, Redis, or knowledge of services.
"""
