"""Models of the package transformers over the paged KV storage.

The modelling code is that of transformers, with another attention function. Only this folder imports transformers, and
it is imported only when such a model is loaded.

- `resolve`: from config.json to a class of transformers, or an error of one sentence
- `load`: loading of weights without a second copy
- `stored`: which weights of a quantized checkpoint are kept as they are stored
- `modules`: linear layers and experts whose weights are packed
- `attention`: the attention function for transformers' layers
- `probe`: a run on a few tokens, which finds out what attention the model needs and rejects what is not supported
- `head`: hidden states to logits, by the model's own code
- `model`: the backend as a `CausalLM`
- `base`: loading, which decoders and encoders share
- `encoder_classes`: from config.json to an encoder, or a classifier over one
- `encoder_rows`, `row_attention`: two ways to run an encoder over rows of several lengths
- `row_probe`: a run on a few rows, which finds the way and compares it with transformers
- `encoder`, `encoder_labels`: encoders and classifiers as models of the runner
- `pictures`: encoders of classes with pictures, beside any text model
- `paused_layers`: their layers, some at a time
"""
