"""Starts the server of `examples.llama_serving`, by the name that it has had beside the recipe."""

import runpy

if __name__ == "__main__":
    runpy.run_module("examples.llama_serving.serve", run_name="__main__", alter_sys=True)
