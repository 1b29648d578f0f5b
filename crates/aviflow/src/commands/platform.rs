//! `node` and `env`.

use super::{App, check, drain, table};
use crate::cli::{EnvCommand, Format, NodeCommand};
use crate::error::Result;
use crate::output::print;
use crate::render::{self, platform};
use aviflow_api::rest::NodeAction;

/// `aviflow node`
pub fn node(app: &App, command: Option<NodeCommand>) -> Result<()> {
    let client = app.client()?;
    match command.unwrap_or(NodeCommand::Ls { output: table() }) {
        NodeCommand::Ls { output } => {
            let nodes = client.nodes()?;
            app.output.answer(output.format, &nodes, |view| platform::nodes(&nodes, view))
        }
        NodeCommand::Show { node, output } => {
            let node = client.node(&node)?;
            app.output.answer(output.format, &node, |view| platform::node(&node, view))
        }
        NodeCommand::Cordon { nodes, why } => act(app, &nodes, &NodeAction::Cordon { reason: why.reason }, "cordoned"),
        NodeCommand::Uncordon { nodes, why } => {
            act(app, &nodes, &NodeAction::Uncordon { reason: why.reason }, "uncordoned")
        }
        NodeCommand::Check(args) => check::check(app, args),
        NodeCommand::Drain(args) => drain::drain(app, args),
        NodeCommand::Drains { output } => drain::drains(app, output.format),
        NodeCommand::Undrain { drain, why } => drain::undrain(app, &drain, why),
    }
}

fn act(app: &App, nodes: &[String], action: &NodeAction, word: &str) -> Result<()> {
    let client = app.client()?;
    for node in nodes {
        let node = client.act_on_node(node, action)?;
        print(&format!("{word} {} on {}\n", node.name, client.context()));
    }
    Ok(())
}

/// `aviflow observed`
pub fn observed(app: &App, format: Format) -> Result<()> {
    let observed = app.client()?.observed()?;
    app.output.answer(format, &observed, |view| render::observed::observed(&observed, view))
}

/// `aviflow env`
pub fn env(app: &App, command: Option<EnvCommand>) -> Result<()> {
    let client = app.client()?;
    match command.unwrap_or(EnvCommand::Ls { output: table() }) {
        EnvCommand::Ls { output } => {
            let list = client.environments()?;
            app.output.answer(output.format, &list, |view| platform::environments(&list, view))
        }
        EnvCommand::Show { environment, output } => {
            let info = client.environment(&environment)?;
            app.output.answer(output.format, &info, |view| platform::environment(&info, view))
        }
    }
}
