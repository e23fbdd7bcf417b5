//! `cascade bench vllm`: finds a Python that has vLLM and measures there.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};

use crate::cli::{Failure, Screen};
use crate::environment::Environment;

/// Where `make bench-vllm` installs vLLM.
const INSTALLED: &str = ".cache/vllm/bin/python";
/// What ends well where both packages are.
const PROBE: &str = "import sys; from importlib.util import find_spec; \
    sys.exit(any(find_spec(name) is None for name in ('vllm', 'cascadekv')))";

/// What to measure with vLLM.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  make bench-vllm
      Install vLLM's CPU build below .cache and measure all of it: about half an hour, 6 GB.
  cascade bench vllm --models 22m --prompts 4096 --from dram --beside none
      How many times faster is a prompt of 4,096 tokens the second time? A few minutes.
  cascade bench vllm --short
      Every figure with a tiny model and two rounds: does it work? Its values mean nothing.
  cascade bench vllm --python ~/venv/bin/python --json vllm.json
      In an environment of yours that has vllm and cascadekv.

Each engine is a process of its own on a model made on the spot, in bfloat16. A round has prompts of
its own: the first run misses everything, the second hits. gain/ is how many times faster its first
token comes; a second run that did not hit makes its figures INVALID, however fast it was. From
files means from another engine, after the page cache was dropped. Run it on a quiet machine: vLLM's
threads wait for each other, so that one busy processor slows all of them.

Exit codes: 0 all figures are there; 1 a figure is INVALID; 2 no Python here has vLLM.")]
pub(super) struct VllmArgs {
    /// Write the figures as JSON, and the surroundings beside them.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Interpreter that has vllm and cascadekv [default: the running one, .cache/vllm/bin/python].
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Models, by their number of parameters.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "22m,91m")]
    models: Vec<Model>,
    /// Lengths of prompts in tokens.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "1024,4096,8192")]
    #[arg(value_parser = clap::value_parser!(u32).range(256..=16_384))]
    prompts: Vec<u32>,
    /// Rounds that count, after one that warms up.
    #[arg(long, value_name = "COUNT", default_value = "5")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Where second runs find their blocks.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "dram,files,served")]
    from: Vec<Source>,
    /// What is measured beside.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "none,example,lmcache")]
    beside: Vec<Beside>,
    /// Directory for models and for the file tier.
    #[arg(long, value_name = "DIR", default_value = ".cache")]
    directory: PathBuf,
    /// A tiny model, prompts of 512 and 1,024 tokens, two rounds: whether all of it works.
    #[arg(long, conflicts_with_all = ["models", "prompts", "rounds"])]
    short: bool,
}

/// A model that is made on the spot.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Model {
    /// 3 million parameters, for tests.
    Tiny,
    /// 22 million parameters.
    #[value(name = "22m")]
    Small,
    /// 91 million parameters.
    #[value(name = "91m")]
    Large,
}

/// Where second runs find their blocks.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Source {
    /// In DRAM of the engine's process.
    Dram,
    /// In files that another engine wrote.
    Files,
    /// In a node's DRAM.
    Served,
}

/// What the connector is compared with.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Beside {
    /// No connector at all.
    None,
    /// The connector that vLLM brings as an example.
    Example,
    /// LMCache, where it is installed.
    Lmcache,
}

/// Measures in a Python that has vLLM; its exit code is ours.
pub(super) fn run(
    args: &VllmArgs,
    interpreter: Option<PathBuf>,
    screen: &mut Screen,
) -> Result<i32, Failure> {
    let python = find_python(args.python.as_deref(), interpreter)?;
    let environment = serde_json::to_string(&Environment::capture(Some(&args.directory)))
        .map_err(|error| Failure::measure("vLLM", error))?;
    screen.remark(format!("measuring with {}", python.display()))?;
    let mut command = Command::new(python);
    command.args(["-m", "cascadekv.bench.vllm", "--environment", &environment]);
    command.args(arguments(args));
    command.arg("--directory").arg(&args.directory);
    if let Some(path) = &args.json {
        command.arg("--json").arg(path);
    }
    let status = command.status().map_err(|error| Failure::measure("vLLM", error))?;
    // Ended by a signal there is no code: it was interrupted.
    Ok(status.code().unwrap_or(crate::cli::EXIT_INTERRUPTED))
}

/// The flags that say what to measure.
fn arguments(args: &VllmArgs) -> Vec<String> {
    let (models, prompts, rounds) = if args.short {
        ("tiny".to_owned(), "512,1024".to_owned(), 2)
    } else {
        (names(&args.models), joined(args.prompts.iter().map(u32::to_string)), args.rounds)
    };
    let mut told: Vec<String> = [
        ("--models", models),
        ("--prompts", prompts),
        ("--rounds", rounds.to_string()),
        ("--from", names(&args.from)),
        ("--beside", names(&args.beside)),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect();
    if args.short {
        told.push("--short".to_owned());
    }
    told
}

fn names<V: ValueEnum>(values: &[V]) -> String {
    let known = values.iter().filter_map(ValueEnum::to_possible_value);
    joined(known.map(|value| value.get_name().to_owned()))
}

fn joined(values: impl Iterator<Item = String>) -> String {
    values.collect::<Vec<_>>().join(",")
}

/// The interpreter that was asked for, or the first that has what it takes.
fn find_python(asked: Option<&Path>, interpreter: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let candidates = match asked {
        Some(path) => vec![path.to_owned()],
        None => interpreter.into_iter().chain([PathBuf::from(INSTALLED)]).collect(),
    };
    candidates.iter().find(|python| has_vllm(python)).cloned().ok_or_else(|| {
        let tried = joined(candidates.iter().map(|python| python.display().to_string()));
        Failure::usage(
            format!("no Python has both vllm and cascadekv; tried {tried}"),
            "run make bench-vllm, which installs them below .cache, or name one with --python",
        )
    })
}

fn has_vllm(python: &Path) -> bool {
    let probe = Command::new(python)
        .args(["-c", PROBE])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    probe.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: VllmArgs,
    }

    #[test]
    fn what_was_asked_reaches_the_measurement_by_name() {
        let line = Line::parse_from(["vllm", "--models", "91m", "--from", "files,served"]);
        let told = arguments(&line.args).join(" ");
        let want = "--models 91m --prompts 1024,4096,8192 --rounds 5 --from files,served \
            --beside none,example,lmcache";
        assert_eq!(told, want);
        let short = Line::parse_from(["vllm", "--short", "--beside", "none"]);
        let told = arguments(&short.args).join(" ");
        assert!(told.starts_with("--models tiny --prompts 512,1024 --rounds 2"), "{told}");
        assert!(told.ends_with("--beside none --short"), "{told}");
        assert!(Line::try_parse_from(["vllm", "--prompts", "17"]).is_err(), "less than two blocks");
    }

    #[test]
    fn without_an_engine_it_says_what_to_install() {
        let missing = Path::new("/nonexistent/python");
        let failure = find_python(Some(missing), None).unwrap_err();
        let told = failure.explain();
        assert!(told.contains("/nonexistent/python") && told.contains("make bench-vllm"), "{told}");
        assert_eq!(failure.exit_code(), crate::cli::EXIT_USAGE);
    }
}
