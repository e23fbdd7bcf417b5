//! `cascade bench vllm`: finds a Python interpreter that has vLLM and runs the benchmark in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cascade_replay::environment::Environment;
use clap::{Args, ValueEnum};

use crate::{Failure, Screen, built};

/// Where `make bench-vllm` installs vLLM.
const INSTALLED: &str = ".cache/vllm/bin/python";
/// A Python program that exits with 0 if both packages are installed.
const PROBE: &str = "import sys; from importlib.util import find_spec; \
    sys.exit(any(find_spec(name) is None for name in ('vllm', 'cascadekv')))";

/// The options of the vLLM benchmark.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  make bench-vllm
      Install vLLM's CPU build below .cache (6 GB) and run the whole benchmark: half an hour.
  cascade bench vllm --models 22m --prompts 4096 --from dram --beside none
      Compare the first and the second run of prompts of 4,096 tokens. A few minutes.
  cascade bench vllm --short
      Check that every measurement works, with a tiny model. Its values mean nothing.
  cascade bench vllm --python ~/venv/bin/python --json vllm.json
      Use another environment that has vllm and cascadekv.

Each engine is a separate process with a generated bfloat16 model. Each round uses new prompts: the
first run misses every block, the second run hits. gain/ is the time to first token of the first run
over that of the second. If a second run did not hit, its figures are INVALID. With --from files,
the second run is in another engine after the page cache was dropped. Run it on an idle machine:
vLLM's threads wait for each other, so one busy processor slows all of them.

Exit codes: 0 all figures were measured; 1 a figure is INVALID; 2 no Python with vLLM was found.")]
pub(crate) struct VllmArgs {
    /// Write the figures as JSON to FILE, and the environment to a file beside it.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Python with vllm and cascadekv [default: beside cascade, then .cache/vllm/bin/python].
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Models, by their number of parameters.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "22m,91m")]
    models: Vec<Model>,
    /// Prompt lengths in tokens.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "1024,4096,8192")]
    #[arg(value_parser = clap::value_parser!(u32).range(256..=16_384))]
    prompts: Vec<u32>,
    /// Measured rounds, after one warm-up round.
    #[arg(long, value_name = "COUNT", default_value = "5")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Where the second runs find their blocks.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "dram,files,served")]
    from: Vec<LoadSource>,
    /// What to compare with.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "none,example,lmcache")]
    beside: Vec<Baseline>,
    /// Measure only the parts with TEXT in their name, such as gain/dram, miss-share, gain/turn-10,
    /// gain/80-percent, gain/example, hints/, connector-cpu, scheduler.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Directory for the models and the file tier.
    #[arg(long, value_name = "DIR", default_value = ".cache")]
    directory: PathBuf,
    /// Only check that everything works: a tiny model, prompts of 512 tokens, two rounds.
    #[arg(long, conflicts_with_all = ["models", "prompts", "rounds"])]
    short: bool,
}

impl VllmArgs {
    pub(super) fn json(&self) -> Option<&Path> {
        self.json.as_deref()
    }
}

/// A generated model.
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

/// Where the second runs find their blocks.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum LoadSource {
    /// DRAM of the engine's process.
    Dram,
    /// Files that another engine wrote.
    Files,
    /// DRAM of a node.
    Served,
}

/// What the connector is compared with.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Baseline {
    /// vLLM without a connector.
    None,
    /// vLLM's `ExampleConnector`.
    Example,
    /// LMCache, if it is installed.
    Lmcache,
}

/// Runs the benchmark in a Python that has vLLM and returns its exit code.
pub(super) fn run(args: &VllmArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let python = find_python(args.python.as_deref())?;
    let environment =
        serde_json::to_string(&Environment::capture(built::build(), Some(&args.directory)))
            .map_err(|error| Failure::measure("vLLM", error))?;
    screen.notice(format!("measuring with {}", python.display()))?;
    let mut command = Command::new(python);
    command.args(["-m", "cascadekv.bench.vllm", "--environment", &environment]);
    command.args(arguments(args));
    command.arg("--directory").arg(&args.directory);
    if let Some(path) = &args.json {
        command.arg("--json").arg(path);
    }
    let status = command.status().map_err(|error| Failure::measure("vLLM", error))?;
    // There is no exit code after a signal, which counts as an interruption.
    Ok(status.code().unwrap_or(crate::EXIT_INTERRUPTED))
}

/// The arguments of the Python benchmark.
fn arguments(args: &VllmArgs) -> Vec<String> {
    let (models, prompts, rounds) = if args.short {
        ("tiny".to_owned(), "512".to_owned(), 2)
    } else {
        (names(&args.models), joined(args.prompts.iter().map(u32::to_string)), args.rounds)
    };
    let mut arguments: Vec<String> = [
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
        arguments.push("--short".to_owned());
    }
    if let Some(only) = &args.only {
        arguments.push(format!("--only={only}"));
    }
    arguments
}

fn names<V: ValueEnum>(values: &[V]) -> String {
    let known = values.iter().filter_map(ValueEnum::to_possible_value);
    joined(known.map(|value| value.get_name().to_owned()))
}

fn joined(values: impl Iterator<Item = String>) -> String {
    values.collect::<Vec<_>>().join(",")
}

/// The requested interpreter, or the first candidate that has both packages.
fn find_python(requested: Option<&Path>) -> Result<PathBuf, Failure> {
    let candidates = match requested {
        Some(path) => vec![path.to_owned()],
        None => python_beside_program().into_iter().chain([PathBuf::from(INSTALLED)]).collect(),
    };
    candidates.iter().find(|python| has_vllm(python)).cloned().ok_or_else(|| {
        let tried = joined(candidates.iter().map(|python| python.display().to_string()));
        Failure::usage(
            format!("no Python has both vllm and cascadekv; tried {tried}"),
            "run make bench-vllm, which installs them below .cache, or give one with --python",
        )
    })
}

/// The interpreter of the environment in which this program is installed.
fn python_beside_program() -> Option<PathBuf> {
    let python = std::env::current_exe().ok()?.with_file_name("python");
    python.exists().then_some(python)
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
    fn options_are_passed_to_the_python_benchmark() {
        let line = Line::parse_from(["vllm", "--models", "91m", "--from", "files,served"]);
        let passed = arguments(&line.args).join(" ");
        let want = "--models 91m --prompts 1024,4096,8192 --rounds 5 --from files,served \
            --beside none,example,lmcache";
        assert_eq!(passed, want);
        let short = Line::parse_from(["vllm", "--short", "--beside", "none"]);
        let passed = arguments(&short.args).join(" ");
        assert!(passed.starts_with("--models tiny --prompts 512 --rounds 2"), "{passed}");
        assert!(passed.ends_with("--beside none --short"), "{passed}");
        let part = Line::parse_from(["vllm", "--only", "gain/dram"]);
        assert!(arguments(&part.args).join(" ").ends_with("--only=gain/dram"));
        assert!(Line::try_parse_from(["vllm", "--prompts", "17"]).is_err(), "less than two blocks");
    }

    #[test]
    fn an_interpreter_without_vllm_is_refused_with_the_command_that_installs_it() {
        let missing = Path::new("/nonexistent/python");
        let failure = find_python(Some(missing)).unwrap_err();
        let text = failure.explain();
        assert!(text.contains("/nonexistent/python") && text.contains("make bench-vllm"), "{text}");
        assert_eq!(failure.exit_code(), crate::EXIT_USAGE);
    }
}
