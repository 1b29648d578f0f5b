use super::*;
use crate::doctor::{Deployed, rights};
use std::collections::BTreeMap;

fn node(name: &str) -> NodeFact {
    let labels = [("nvidia.com/gpu.product", "H100"), ("pool", "hgx"), ("example.com/leaf", "leaf-1")];
    let devices: BTreeMap<String, u32> = [("nvidia.com/gpu".to_owned(), 8), ("rdma/ib".to_owned(), 8)].into();
    NodeFact {
        name: name.to_owned(),
        kubelet: "v1.36.3".to_owned(),
        labels: labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
        capacity: devices.clone(),
        allocatable: devices,
    }
}

/// The rights of a control plane with TLS, of which its account has these.
fn held(has: impl Fn(&Right) -> bool) -> Vec<(Right, bool)> {
    let deployed = Deployed { tls: true, tls_secret: Some("web".to_owned()) };
    let with = |right: Right| {
        let has = has(&right);
        (right, has)
    };
    rights(&deployed).into_iter().map(with).collect()
}

/// A cluster that has everything.
fn sound() -> Facts {
    let schema = |d: &Value| d["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    let plural = |d: &Value| d["spec"]["names"]["plural"].as_str().unwrap_or_default().to_owned();
    let kubernetes = serde_json::json!({
        "nodeSelector": {"pool": "hgx"}, "topologyKeys": ["example.com/leaf"], "runtimeClass": "nvidia",
        "fabric": {"rdmaResources": {"rdma/ib": 8}, "capabilities": ["IPC_LOCK"]}, "storage": {"claim": "jobs"},
    });
    let claims = BTreeMap::from([("jobs".to_owned(), (true, vec!["ReadWriteMany".to_owned()]))]);
    Facts {
        version: Ok("v1.36.3".to_owned()),
        definitions: Ok(definitions().iter().map(|(_, d)| (plural(d), Some(schema(d)))).collect()),
        policies: Ok(POLICIES.iter().map(|p| (*p).to_owned()).collect()),
        namespace: "aviflow-system".to_owned(),
        rights: Ok(held(|_| true)),
        pools: Ok(vec![Profile {
            pool: "hgx".to_owned(),
            kubernetes: serde_json::from_value(kubernetes).expect("a pool's part"),
        }]),
        nodes: Ok(vec![node("hgx0"), node("hgx1")]),
        runtime_classes: Ok(BTreeSet::from(["nvidia".to_owned()])),
        priority_classes: Ok(BTreeSet::from(["aviflow-jobs".to_owned()])),
        namespaces: Ok(vec![NamespaceFact { name: "nlp".to_owned(), level: Some("privileged".to_owned()), claims }]),
        priority_class: "aviflow-jobs".to_owned(),
    }
}

#[test]
fn a_sound_cluster_has_nothing_to_do() {
    let found = judge(&sound());
    assert!(found.iter().all(|f| f.health == Health::Good && f.remedy.is_none()), "{found:#?}");
    let names: BTreeSet<&str> = found.iter().map(|f| f.name).collect();
    let looked_at = [
        "GPUs",
        "admission",
        "client certificates",
        "definitions",
        "fabric",
        "kubelets",
        "kubernetes",
        "labels",
        "namespaces",
        "pod security",
        "priority class",
        "rights",
        "runtime class",
        "storage",
    ];
    assert_eq!(names, looked_at.into_iter().filter(|n| *n != "namespaces").collect());
}

#[test]
fn each_lack_is_found_and_named() {
    #[track_caller]
    fn check(break_it: impl FnOnce(&mut Facts), name: &str, health: Health, says: &str) {
        let mut facts = sound();
        break_it(&mut facts);
        let wrong: Vec<Finding> = judge(&facts).into_iter().filter(|f| f.health != Health::Good).collect();
        assert_eq!(wrong.len(), 1, "one lack, one finding: {wrong:#?}");
        assert_eq!((wrong[0].name, wrong[0].health), (name, health), "{wrong:#?}");
        assert!(wrong[0].found.contains(says), "{wrong:#?}");
        assert!(wrong[0].remedy.is_some(), "{wrong:#?}");
    }
    fn nodes(facts: &mut Facts) -> &mut Vec<NodeFact> {
        facts.nodes.as_mut().expect("nodes")
    }
    fn pool(facts: &mut Facts) -> &mut Profile {
        &mut facts.pools.as_mut().expect("pools")[0]
    }
    fn namespace(facts: &mut Facts) -> &mut NamespaceFact {
        &mut facts.namespaces.as_mut().expect("namespaces")[0]
    }
    use Health::{Broken, Doubtful};
    let older = |f: &mut Facts| {
        f.version = Ok("v1.35.9".to_owned());
        nodes(f).iter_mut().for_each(|n| n.kubelet = "v1.34.1".to_owned());
    };
    check(older, "kubernetes", Broken, "v1.35.9");
    check(|f| f.version = Ok("v2.0.0".to_owned()), "kubernetes", Broken, "v2.0.0");
    check(|f| nodes(f)[0].kubelet = "v1.32.9".to_owned(), "kubelets", Broken, "hgx0 has v1.32.9");
    check(|f| nodes(f)[1].kubelet = "v1.37.0".to_owned(), "kubelets", Broken, "hgx1 has v1.37.0");
    let no_pools = |f: &mut Facts| drop(f.definitions.as_mut().expect("definitions").remove("pools"));
    check(no_pools, "definitions", Broken, "pools are not there");
    let older = |f: &mut Facts| {
        let queues = f.definitions.as_mut().expect("definitions").get_mut("queues");
        let spec = queues.and_then(Option::as_mut).and_then(|s| s.pointer_mut("/properties/spec/properties"));
        spec.and_then(Value::as_object_mut).expect("its spec").remove("timeSharing");
    };
    check(older, "definitions", Broken, "no `spec.timeSharing`");
    let unbound = |f: &mut Facts| {
        f.policies.as_mut().expect("policies").remove("ValidatingAdmissionPolicyBinding aviflow-pods");
    };
    check(unbound, "admission", Broken, "ValidatingAdmissionPolicyBinding aviflow-pods");
    let lacks = |f: &mut Facts, right: &str| f.rights = Ok(held(|r| r.to_string() != right));
    check(|f| lacks(f, "create pods"), "rights", Broken, "may not `create pods`");
    check(|f| lacks(f, "get secrets web"), "rights", Broken, "may not `get secrets web`");
    let clients = "get configmaps extension-apiserver-authentication";
    check(|f| lacks(f, clients), "client certificates", Doubtful, "in kube-system: people come in with tokens alone");
    check(|f| f.rights = Ok(held(|r| r.observe)), "rights", Doubtful, "may only look");
    check(|f| f.rights = Err("forbidden".into()), "rights", Broken, "forbidden");
    check(|f| nodes(f).iter_mut().for_each(|n| drop(n.labels.remove("pool"))), "GPUs", Broken, "pool=hgx");
    check(|f| nodes(f)[0].capacity.clear(), "GPUs", Broken, "no nvidia.com/gpu on hgx0");
    let healthy = |f: &mut Facts, device: &str, n| {
        nodes(f)[0].allocatable.insert(device.to_owned(), n);
    };
    check(|f| healthy(f, "nvidia.com/gpu", 7), "GPUs", Doubtful, "7 of 8");
    check(|f| drop(nodes(f)[1].labels.remove("nvidia.com/gpu.product")), "labels", Doubtful, "on hgx1");
    check(|f| drop(nodes(f)[1].labels.remove("example.com/leaf")), "labels", Doubtful, "example.com/leaf on hgx1");
    check(|f| healthy(f, "rdma/ib", 4), "fabric", Broken, "hgx0 has 4");
    check(|f| f.runtime_classes = Ok(BTreeSet::new()), "runtime class", Broken, "nvidia");
    check(|f| f.priority_classes = Ok(BTreeSet::new()), "priority class", Broken, "aviflow-jobs");
    check(|f| namespace(f).claims.clear(), "storage", Broken, "no claim nlp/jobs");
    let once = vec!["ReadWriteOnce".to_owned()];
    check(|f| drop(namespace(f).claims.insert("jobs".into(), (true, once))), "storage", Broken, "ReadWriteOnce");
    let many = vec!["ReadWriteMany".to_owned()];
    check(|f| drop(namespace(f).claims.insert("jobs".into(), (false, many))), "storage", Doubtful, "not bound");
    check(|f| pool(f).kubernetes.storage = None, "storage", Doubtful, "has none");
    check(|f| namespace(f).level = Some("baseline".into()), "pod security", Broken, "IPC_LOCK");
    check(|f| namespace(f).level = Some("restricted".into()), "pod security", Broken, "every job pod");
}

#[test]
fn a_plain_pool_needs_no_privilege() {
    let mut facts = sound();
    facts.pools.as_mut().expect("pools")[0].kubernetes.fabric = Default::default();
    facts.namespaces.as_mut().expect("namespaces")[0].level = Some("baseline".into());
    assert!(judge(&facts).iter().all(|f| f.health == Health::Good));
}

#[test]
fn nodes_without_gpus_are_no_lack_of_a_pool_of_all_nodes() {
    let mut facts = sound();
    facts.pools = Ok(vec![Profile::nvidia("main")]);
    let plain = NodeFact { name: "control".into(), kubelet: "v1.36.3".into(), ..NodeFact::default() };
    facts.nodes.as_mut().expect("nodes").push(plain);
    let wrong: Vec<Finding> = judge(&facts).into_iter().filter(|f| f.health != Health::Good).collect();
    assert!(wrong.iter().all(|f| f.name == "storage"), "{wrong:#?}");
}

#[test]
fn versions_of_vendors_are_read() {
    assert_eq!(minor("v1.36.3-gke.12"), Some(36));
    assert_eq!(minor("v1.37+"), Some(37));
    assert_eq!(minor("v2.1"), None);
    assert_eq!(minor(""), None);
}
