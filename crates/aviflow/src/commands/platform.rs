//! `node`, `queue` and `env`.

use super::{App, table};
use crate::cli::{EnvCommand, NodeCommand, QueueCommand};
use crate::error::Result;
use crate::output::print;
use crate::render::platform;
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
        NodeCommand::Cordon { nodes } => act(app, &nodes, &NodeAction::Cordon { reason: None }, "cordoned"),
        NodeCommand::Uncordon { nodes } => act(app, &nodes, &NodeAction::Uncordon { reason: None }, "uncordoned"),
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

/// `aviflow queue`
pub fn queue(app: &App, command: Option<QueueCommand>) -> Result<()> {
    let QueueCommand::Ls { output } = command.unwrap_or(QueueCommand::Ls { output: table() });
    let queues = app.client()?.queues()?;
    app.output.answer(output.format, &queues, |view| platform::queues(&queues, view))
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
