//! The one binary of Aviflow: the command line, the control plane (`serve`) and
//! the supervisor of a worker (`agent`).
//!
//! - [`cli`]: what may be typed
//! - [`commands`]: what each command does
//! - [`submit`]: a document and everything it names, resolved by content
//! - [`follow`]: a job's events as lines and a bar
//! - [`render`]: what a person reads; pure
//! - [`client`]: the REST API from its other side
//! - [`context`], [`home`]: which control plane, and where the local one lives
//! - [`serve`]: the control plane put together
//!
//! Commands are synchronous; only `serve` has a runtime. Nothing here decides
//! what runs where.

mod channel;
mod cli;
mod client;
mod commands;
mod context;
mod error;
mod follow;
mod home;
mod output;
mod render;
mod serve;
mod submit;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let output = output::Output::new(cli.global.color);
    match commands::dispatch(cli, output) {
        Ok(code) => code,
        Err(failure) => {
            eprint!("{}", failure.render(output.error_style));
            ExitCode::from(failure.code)
        }
    }
}
