//! Plays parts in the tests of this crate that need a process of their own:
//! `agent FOLDER` is the agent, `build HOME ENVIRONMENT` another builder.

use aviflow_local::LocalConfig;
use aviflow_local::environments::{Cancel, Environments};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["agent", folder] => aviflow_agent::run(folder.as_ref()),
        ["build", home, environment] => build(PathBuf::from(home), environment),
        _ => {
            eprintln!("usage: aviflow-local-helper agent FOLDER | build HOME ENVIRONMENT");
            ExitCode::from(2)
        }
    }
}

/// Builds an environment, given as JSON, and prints what there was to do.
fn build(home: PathBuf, environment: &str) -> ExitCode {
    let objects = home.join("objects");
    let config = LocalConfig::new(home, Vec::new(), Arc::new(move |sha256| Ok(objects.join(sha256))));
    let environment = match serde_json::from_str(environment) {
        Ok(environment) => environment,
        Err(e) => {
            eprintln!("the environment is unreadable: {e}");
            return ExitCode::from(2);
        }
    };
    match Environments::new(&config).build(&environment, &Cancel::default(), &|_| {}) {
        Ok(outcome) => {
            println!("{outcome:?}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
