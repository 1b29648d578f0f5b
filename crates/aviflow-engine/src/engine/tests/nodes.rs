//! Cordons and drains: at once, in a window, and rolling.

use super::*;
use aviflow_core::model::NodeCondition::{self, Cordoned, Gone, Ready};

fn order(nodes: &[&str]) -> DrainOrder {
    DrainOrder {
        nodes: nodes.iter().map(|n| (*n).to_owned()).collect(),
        at: None,
        length: None,
        max_unavailable: None,
        by_when: None,
        by: ops(),
        reason: Some("firmware".into()),
    }
}

fn cordon(node: &str, cordoned: bool) -> Input {
    Input::Cordon { node: node.into(), cordoned, by: ops(), reason: None }
}

fn cancel(drain: DrainName) -> Input {
    Input::CancelDrain { drain, by: ops(), reason: None }
}

impl World {
    fn condition(&self, name: &str) -> NodeCondition {
        self.node(name).condition
    }

    /// The nodes that take no work.
    fn away(&self) -> Vec<&str> {
        let nodes = self.engine.snapshot().nodes.values();
        nodes.filter(|n| n.condition == Cordoned).map(|n| n.name.as_str()).collect()
    }
}

#[test]
fn a_cordon_is_recorded_and_outlives_the_node_and_the_control_plane() {
    let mut world = World::new();
    world.ask(cordon("n1", true));
    assert_eq!(world.act(), "ops on node n1: cordoned node n1");
    world.nothing(cordon("n1", true));
    world.turn(&[Input::Observe(Observation::NodeGone { name: "n1".into() })]);
    assert_eq!(world.condition("n1"), Gone);
    world.restart();
    world.see(1);
    assert_eq!(world.condition("n1"), Cordoned);
    world.ask(cordon("n1", false));
    assert_eq!((world.condition("n1"), world.act().as_str()), (Ready, "ops on node n1: uncordoned node n1"));
    assert_eq!(world.refused(cordon("n9", true)), "there is no node `n9`");
}

#[test]
fn a_drain_begins_at_once_and_ends_by_its_length_or_an_uncordon() {
    let mut world = World::new();
    let hour = DrainOrder { length: Some(Span::minutes(60)), ..order(&["n1"]) };
    world.ask(Input::Drain(hour.clone()));
    assert_eq!(world.act(), "ops on node n1: drains node n1 from now, each for 1h (firmware)");
    assert_eq!(world.condition("n1"), Cordoned);
    world.later(60);
    world.nothing(Input::Drain(hour));
    // It is cordoned as well: the end of the drain does not end that.
    world.ask(cordon("n1", true));
    world.later(3600).turn(&[]);
    assert_eq!((world.condition("n1"), world.node("n1").drain.clone()), (Cordoned, None));
    world.ask(cordon("n1", false));
    assert_eq!(world.condition("n1"), Ready);
    world.ask(Input::Drain(order(&["n1", "n2", "n1"])));
    assert_eq!(world.away(), ["n1", "n2"]);
    world.ask(cordon("n2", false));
    assert_eq!(world.act(), "ops on node n2: uncordoned node n2, which ends its drain");
    assert_eq!((world.condition("n2"), world.node("n2").drain.clone()), (Ready, None));
}

#[test]
fn a_window_begins_and_ends_by_itself_also_after_a_crash() {
    let mut world = World::new();
    let at = |world: &World| Some(world.now + Span::minutes(60));
    let window = DrainOrder { at: at(&world), length: Some(Span::minutes(30)), ..order(&["n1"]) };
    world.ask(Input::Drain(window.clone()));
    assert_eq!(world.act(), "ops on node n1: drains node n1 from in 1h, each for 30m (firmware)");
    assert_eq!(world.condition("n1"), Ready);
    world.nothing(Input::Drain(window.clone()));
    let Answer::DoneWith(warnings) = world.nothing(cordon("n1", false)) else { panic!("no warning") };
    assert!(warnings[0].contains("planned to begin in 1h"), "{warnings:?}");
    world.restart();
    world.turn(&[]);
    assert_eq!(world.engine.next_wake(), window.at);
    world.later(3600).turn(&[]);
    assert_eq!(world.condition("n1"), Cordoned);
    world.later(1800);
    world.restart();
    world.turn(&[]);
    assert_eq!((world.condition("n1"), world.node("n1").drain.clone()), (Ready, None));
    // Another one, called off before it begins.
    world.ask(Input::Drain(DrainOrder { at: at(&world), ..order(&["n1"]) }));
    world.ask(cancel(DrainName::Node("n1".into())));
    assert_eq!(world.act(), "ops on node n1: called off the drain of node n1");
    assert_eq!(world.refused(cancel(DrainName::Node("n1".into()))), "node `n1` is not drained");
}

#[test]
fn a_rolling_drain_takes_nodes_as_they_are_empty_and_is_over_with_the_last() {
    let mut world = World::with_nodes(3);
    let job = world.submit(submission("j", 1, 8));
    world.run(job);
    let each = Some(Span::minutes(10));
    let rolling = DrainOrder { max_unavailable: Some(1), length: each, ..order(&["n1", "n2", "n3"]) };
    let first = Answer::Rolling { drain: 1, warnings: vec![] };
    assert_eq!(world.ask(Input::Drain(rolling.clone())), first);
    let acts = world.store.acts();
    let act = acts.iter().find(|a| a.kind == ActKind::Drain).expect("it is recorded");
    assert_eq!((act.name.as_str(), act.what.as_str()), ("1", "drains n1, n2, n3, at most 1 at once, each for 10m"));
    assert_eq!(world.away(), ["n2"]);
    assert_eq!(world.nothing(Input::Drain(rolling)), first);
    assert_eq!(
        world.refused(Input::Drain(order(&["n3"]))),
        "node `n3` is part of drain 1; cancel that first, or cordon the node to keep new work away at once"
    );
    world.restart();
    world.later(600).turn(&[]);
    assert_eq!(world.away(), ["n3"]);
    // Back before its time, as a person says; the last is not empty.
    world.ask(cordon("n3", false));
    assert_eq!(world.away(), Vec::<&str>::new());
    world.end(job, false);
    assert_eq!(world.away(), ["n1"]);
    assert_eq!(world.engine.snapshot().drains.len(), 1);
    world.later(600).turn(&[]);
    assert_eq!((world.away(), world.engine.snapshot().drains.len()), (vec![], 0));
    assert_eq!(world.refused(cancel(DrainName::Rolling(1))), "there is no drain 1; it is over, or was cancelled");
    // Its number does not come again.
    world.restart();
    let again = DrainOrder { by_when: Some(world.now + Span::minutes(600)), ..order(&["n1"]) };
    assert_eq!(world.ask(Input::Drain(again)), Answer::Rolling { drain: 2, warnings: vec![] });
}

#[test]
fn a_rolling_drain_is_called_off_by_its_number() {
    let mut world = World::with_nodes(3);
    world.ask(Input::Drain(order(&["n3"])));
    let rolling = DrainOrder { max_unavailable: Some(1), ..order(&["n1", "n2", "n3"]) };
    let Answer::Rolling { drain, warnings } = world.ask(Input::Drain(rolling)) else { panic!("no number") };
    assert_eq!(warnings, ["n3 has a drain of its own and is left out"]);
    assert_eq!(world.condition("n1"), Cordoned);
    let Answer::DoneWith(warnings) = world.ask(cancel(DrainName::Rolling(drain))) else { panic!("no warning") };
    assert_eq!(warnings, ["still away until somebody uncordons them: n1"]);
    assert_eq!((world.condition("n1"), world.condition("n2")), (Cordoned, Ready));
    world.ask(cordon("n1", false));
    assert_eq!(world.condition("n1"), Ready);
}

#[test]
fn what_no_drain_can_be_is_refused() {
    let mut world = World::new();
    let at = world.now;
    let mut say = |order: DrainOrder| world.refused(Input::Drain(order));
    assert!(say(order(&[])).contains("no node is named"));
    assert_eq!(say(order(&["n9"])), "there is no node `n9`");
    assert!(say(DrainOrder { length: Some(Span(0)), ..order(&["n1"]) }).contains("not positive"));
    assert!(say(DrainOrder { max_unavailable: Some(0), ..order(&["n1"]) }).contains("allow 1 at least"));
    assert!(say(DrainOrder { by_when: Some(at), ..order(&["n1"]) }).contains("is past"));
    let both = DrainOrder { max_unavailable: Some(1), at: Some(at + Span(5)), ..order(&["n1"]) };
    assert!(say(both).contains("begins by itself"));
    let over = DrainOrder { at: Some(at - Span(9)), length: Some(Span(9)), ..order(&["n1"]) };
    assert!(say(over).contains("is over already"));
}
