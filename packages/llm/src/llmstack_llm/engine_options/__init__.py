"""The options of an engine, declared by theme; `EngineArgs` has all of them."""
