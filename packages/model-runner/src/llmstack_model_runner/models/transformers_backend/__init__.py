"""Models of the package transformers over the paged KV storage: its own modelling code, with our attention plugged in.

Only this folder imports transformers, and nobody imports this folder before such a model is asked for.

- `resolve`: from config.json to a class of transformers, or a sentence that says why not
- `load`: weights into it, without a second copy
- `attention`: the attention function that the class is given
- `probe`: what the model asks of attention, found out by running it, and refusals of what blocks cannot give it
- `head`: hidden states to logits, through the class's own last lines
- `model`: all of it as a `CausalLM`
"""
