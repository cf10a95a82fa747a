"""A command line with the engine's flags and flags of the script."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser(description="continue prompts")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_model_len=256)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--top-k", type=int)
    parser.add_argument("--prompt", default="How do you list files?")
    return parser


def main(args):
    own = {name: args.pop(name) for name in ("max_tokens", "top_k", "prompt")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.ignore_eos = True
    for name in ("max_tokens", "top_k"):
        if own[name] is not None:
            setattr(params, name, own[name])
    (output,) = llm.generate([own["prompt"]], params)
    print(len(output.outputs[0].token_ids), args["max_model_len"], args["enforce_eager"])


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
