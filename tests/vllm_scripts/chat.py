"""One conversation, a batch of them, and one with tools and a template of the script's own."""

from dataclasses import asdict

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import FlexibleArgumentParser

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "How do you list files?"},
]
TOOLS = [{"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}"


def show(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")


def main(engine_args):
    llm = LLM(**asdict(engine_args))
    params = SamplingParams(temperature=0, max_tokens=8)
    show(llm.chat(CONVERSATION, params, use_tqdm=False))
    show(llm.chat([CONVERSATION] * 3, sampling_params=params, use_tqdm=True))
    show(llm.chat(CONVERSATION, params, tools=TOOLS, chat_template=TEMPLATE))


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    main(EngineArgs.from_cli_args(parser.parse_args()))
