//! The agent alone, as it is copied into a container: `aviflow-agent FOLDER`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    match (arguments.next(), arguments.next()) {
        (Some(folder), None) => aviflow_agent::run(Path::new(&folder)),
        _ => {
            eprintln!("usage: aviflow-agent FOLDER, the folder of a worker with its worker.json");
            ExitCode::from(2)
        }
    }
}
