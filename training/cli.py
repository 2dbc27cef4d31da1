"""`coolsd fit`: Lightning's command line, with the model and the data named by class_path in the YAML file."""

from lightning.pytorch.cli import LightningCLI


def main(args: list[str] | None = None) -> LightningCLI:
    """`args` None reads the command line; sys.argv is never assigned, for Lightning runs it again in its processes."""
    return LightningCLI(args=args, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
