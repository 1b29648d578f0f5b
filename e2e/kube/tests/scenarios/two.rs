//! Two control planes on one database: the second takes over, and where both decide by mistake, nothing is done twice.

use super::life::partitions;
use super::{LONGEST, sweep_jobs};
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::{Phase as _, Plane};
use aviflow_store::contract::server::Server;
use aviflow_testcluster::until;
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Leaves the cluster to others than the world's control plane, which knows another store.
fn instead(world: &mut World, test: impl FnOnce(&World, &str) -> Result<()>) -> Result<()> {
    sweep_jobs(world)?;
    let ended = world.plane.stop()?;
    ensure!(ended.success(), "it ended with {ended}: {}", world.plane.log());
    test(world, &Server::shared().database())?;
    world.plane.run()
}

/// Where one of several listens.
fn listens(world: &World, port: u16) -> String {
    format!("{}:{port}", world.cluster.host_ip())
}

/// How long it takes from now until it decides.
fn until_ready(address: &str) -> Result<Duration> {
    let begun = Instant::now();
    until(&format!("{address} decides"), LONGEST, || {
        Ok(Plane::asked(address, "/readyz").filter(|(status, _)| *status == 200).map(|_| ()))
    })?;
    Ok(begun.elapsed())
}

/// Waits until one says that it waits for another.
fn until_waits(address: &str, holder: &str) -> Result<()> {
    let why = format!("waits: {holder} holds the lease aviflow-system/aviflow");
    until(&format!("{address} waits for {holder}"), LONGEST, || {
        let said = Plane::asked(address, "/readyz");
        Ok(said.filter(|(status, body)| *status == 503 && body.contains(&why)).map(|_| ()))
    })?;
    let (health, _) = Plane::asked(address, "/healthz").context("it does not answer")?;
    let (status, body) = Plane::asked(address, "/v1/jobs").context("it does not answer")?;
    ensure!(health == 200 && status == 503 && body.contains(&why), "{health} {status}: {body}");
    Ok(())
}

fn uids(pods: &[Value]) -> BTreeSet<String> {
    pods.iter().filter_map(|pod| pod["metadata"]["uid"].as_str()).map(str::to_owned).collect()
}

/// A job of two nodes that is under way for a while, and says so each second.
fn lasting(world: &World, name: &str, seconds: u32) -> Result<BTreeSet<String>> {
    // The pods of the job before may be on their way out.
    until("nothing is left of others", LONGEST, || Ok(world.cluster.pods()?.is_empty().then_some(())))?;
    let script = format!("for i in $(seq {seconds}); do echo line $i of $NODE_RANK; sleep 1; done; echo over");
    world.cluster.apply(&world.job(name, 2, 4, &script).to_string())?;
    world.cluster.phase(name, "Running")?;
    let pods = uids(&world.cluster.pods()?);
    ensure!(pods.len() == 2, "{pods:?}");
    Ok(pods)
}

/// That it ended well in its first attempt, and each of its ranks said everything once.
fn ran_once(world: &World, plane: &Plane, name: &str, seconds: u32) -> Result<()> {
    let object = world.cluster.phase(name, "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    let log = plane.ok(&["logs", name])?;
    for rank in 0..2 {
        for i in 1..=seconds {
            let line = format!("line {i} of {rank}");
            let said = log.lines().filter(|said| said.ends_with(&line)).count();
            ensure!(said == 1, "`{line}` was said {said} times: {log}");
        }
    }
    ensure!(log.matches("over").count() == 2, "{log}");
    Ok(())
}

pub fn the_second_control_plane_takes_over(world: &mut World) -> Result<()> {
    instead(world, |world, store| {
        let (at_first, at_second) = ("127.0.0.1:7083", "127.0.0.1:7084");
        let mut first = Plane::named(&world.cluster, "aviflow", "first", &["--store", store, "--listen", at_first])?;
        let mut second = first.beside("second", &["--store", store, "--listen", at_second]);
        first.run()?;
        second.begin()?;
        until_waits(at_second, "first")?;
        let pods = lasting(world, "killed", 30)?;
        first.kill()?;
        let taken = until_ready(at_second)?;
        println!("after kill -9 the second control plane was ready in {:.1} s", taken.as_secs_f64());
        ensure!(uids(&world.cluster.pods()?) == pods, "the pods are those of before");
        ran_once(world, &second, "killed", 30)?;
        partitions(&second)?;
        // And back, in good order.
        first.begin()?;
        until_waits(at_first, "second")?;
        let pods = lasting(world, "handed-over", 20)?;
        let ended = second.stop()?;
        let taken = until_ready(at_first)?;
        ensure!(ended.success(), "it ended with {ended}: {}", second.log());
        println!("after an end in good order the other control plane was ready in {:.1} s", taken.as_secs_f64());
        ensure!(uids(&world.cluster.pods()?) == pods, "the pods are those of before");
        ran_once(world, &first, "handed-over", 20)?;
        let jobs = first.json(&["ls", "--all"])?;
        ensure!(jobs.as_array().map(Vec::len) == Some(2), "each was submitted once: {jobs}");
        partitions(&first)?;
        // Who waits ends when it is asked to.
        second.begin()?;
        until_waits(at_second, "first")?;
        let ended = second.stop()?;
        ensure!(ended.success(), "it ended with {ended}: {}", second.log());
        sweep_jobs(world)?;
        first.stop().map(drop)
    })
}

/// A lease of another name, which the account may use by mistake as well.
const OTHER_LEASE: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: other-lease, namespace: aviflow-system}
rules:
  - {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [other], verbs: [get, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: other-lease, namespace: aviflow-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: other-lease}
subjects: [{kind: ServiceAccount, name: aviflow, namespace: aviflow-system}]
";

pub fn two_control_planes_by_mistake(world: &mut World) -> Result<()> {
    instead(world, |world, store| {
        world.cluster.apply(OTHER_LEASE)?;
        let mut first = Plane::named(&world.cluster, "aviflow", "first", &["--store", store])?;
        let (agents, depot) = (listens(world, 7085), listens(world, 7086));
        let elsewhere = ["--store", store, "--lease", "other", "--agents", &agents, "--depot", &depot];
        let mut other = Plane::named(&world.cluster, "aviflow", "other", &elsewhere)?;
        first.run()?;
        let pods = lasting(world, "meanwhile", 40)?;
        other.run()?;
        // Both see it, and both would have it.
        world.cluster.apply(&world.job("one", 1, 1, "echo once").to_string())?;
        let ended = first.ended()?;
        let said = first.log();
        ensure!(ended.code() == Some(125), "it ended with {ended}: {said}");
        ensure!(said.contains("another control plane, other, took over the store (term "), "{said}");
        let object = world.cluster.phase("one", "Succeeded")?;
        ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
        // Started again, as Kubernetes would, it has the store in its turn; and the other ends.
        first.run()?;
        world.cluster.apply(&world.job("two", 1, 1, "echo once").to_string())?;
        let ended = other.ended()?;
        let said = other.log();
        ensure!(ended.code() == Some(125), "it ended with {ended}: {said}");
        ensure!(said.contains("another control plane, first, took over the store (term "), "{said}");
        let left: BTreeSet<String> = uids(&world.cluster.pods()?).intersection(&pods).cloned().collect();
        ensure!(left == pods, "what ran before runs on in its pods");
        ran_once(world, &first, "meanwhile", 40)?;
        world.cluster.phase("two", "Succeeded")?;
        let jobs = first.json(&["ls", "--all"])?;
        ensure!(jobs.as_array().map(Vec::len) == Some(3), "each was submitted once: {jobs}");
        for name in ["one", "two"] {
            let shown = first.json(&["show", name])?;
            ensure!(shown["attempts"] == 1, "{shown}");
        }
        partitions(&first)?;
        sweep_jobs(world)?;
        world.cluster.kubectl_ok(&["delete", "role,rolebinding", "other-lease", "-n", "aviflow-system"])?;
        first.stop().map(drop)
    })
}
