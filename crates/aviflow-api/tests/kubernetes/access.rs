//! Who may do what: queues, submitters, pods, roles.

use crate::cluster::Cluster;
use crate::refused::object;
use serde_json::json;

/// Two people who may both submit in their namespace; one of them may use the queue `nlp`.
const PEOPLE: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: team}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: team, namespace: team}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: aviflow-user}
subjects:
  - {apiGroup: rbac.authorization.k8s.io, kind: User, name: ann}
  - {apiGroup: rbac.authorization.k8s.io, kind: User, name: ben}
---
# All that there is, but in one namespace.
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: owner, namespace: team}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects:
  - {apiGroup: rbac.authorization.k8s.io, kind: User, name: ann}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: use-nlp}
rules:
  - {apiGroups: [aviflow.dev], resources: [queues], resourceNames: [nlp, default], verbs: [use]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: use-nlp}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: use-nlp}
subjects:
  - {apiGroup: rbac.authorization.k8s.io, kind: User, name: ann}
";

/// The control plane's account, as a user of its own certificate.
const PLANE: &str = "/CN=system:serviceaccount:aviflow-system:aviflow";

const CREATE: &str = "-n team create -f -";

/// Who may use a queue submits to it, nobody else; a job without a queue goes to the default one.
pub fn queues(cluster: &Cluster) {
    cluster.must("admin", "apply -f -", PEOPLE);
    for (user, subject) in [("ann", "/CN=ann"), ("ben", "/CN=ben"), ("plane", PLANE)] {
        cluster.user(user, subject);
    }
    cluster.must("ann", CREATE, &object("TrainingJob", "to-nlp", &json!({"queue": "nlp"})));
    cluster.must("ann", CREATE, &object("TrainingJob", "to-default", &json!({})));
    let mut shown = String::new();
    for (user, queue) in [("ann", json!({"queue": "vision"})), ("ben", json!({"queue": "nlp"})), ("ben", json!({}))] {
        let said = cluster.kubectl(user, CREATE, &object("TrainingJob", "refused", &queue));
        assert!(!said.ok, "{user} {queue}");
        shown.push_str(&said.err);
    }
    crate::shown::snapshot("queues-in-use", &shown);
}

/// The submitter is who submits, whatever the object says; only the control plane names another.
pub fn submitters(cluster: &Cluster) {
    let stamped = |name: &str| {
        cluster.get(&format!("-n team tj {name}"))["metadata"]["annotations"]["aviflow.dev/submitter"].clone()
    };
    assert_eq!(stamped("to-nlp"), "ann");
    let named = |name: &str, submitter: &str| {
        let annotations = format!("metadata:\n  annotations: {{aviflow.dev/submitter: {submitter}, other: kept}}");
        object("TrainingJob", name, &json!({"queue": "nlp"})).replace("metadata:", &annotations)
    };
    cluster.must("ann", CREATE, &named("own", "ann"));
    cluster.must("plane", CREATE, &named("for-ben", "ben"));
    // Which job an object is: an object with another's number would be his job, to show and to end.
    let of_job = |name: &str, number: u32| {
        let annotations =
            format!("metadata:\n  annotations: {{aviflow.dev/for-job: \"{number}\", aviflow.dev/work: a}}");
        object("TrainingJob", name, &json!({"queue": "nlp"})).replace("metadata:", &annotations)
    };
    cluster.must("plane", CREATE, &of_job("made", 7));
    assert_eq!(stamped("for-ben"), "ben");
    let mut shown = String::new();
    let mut refused = |user: &str, arguments: &str, input: &str| {
        let said = cluster.kubectl(user, arguments, input);
        assert!(!said.ok, "{user} {arguments}: {}", said.out);
        shown.push_str(&said.err);
    };
    // Ann owns the namespace, and still names nobody else: that right is of all namespaces.
    refused("ann", CREATE, &named("forged", "ben"));
    refused("ann", CREATE, &object("TrainingJob", "forged", &json!({"queue": "nlp", "provenance": {"file": "a"}})));
    refused("ann", "-n team annotate --overwrite tj to-nlp aviflow.dev/submitter=ben", "");
    refused("ann", "-n team annotate tj to-nlp aviflow.dev/submitter-", "");
    refused("plane", "-n team annotate --overwrite tj to-nlp aviflow.dev/submitter=ben", "");
    refused("ann", CREATE, &of_job("forged", 7));
    refused("ann", "-n team annotate tj to-nlp aviflow.dev/for-job=7", "");
    refused("ann", "-n team annotate --overwrite tj made aviflow.dev/for-job=8", "");
    refused("ann", "-n team annotate tj made aviflow.dev/work-", "");
    crate::shown::snapshot("submitters", &shown);
    cluster.must("ann", "-n team annotate tj to-nlp note=fine", "");
}

/// Nobody but the control plane makes pods that count as a job's.
pub fn pods(cluster: &Cluster) {
    let pod = |name: &str, metadata: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}{metadata}}}\nspec: {{containers: [{{name: a, image: a}}]}}\n"
        )
    };
    let label = ", labels: {aviflow.dev/job: to-nlp, app: a}";
    let uid = cluster.get("-n team tj to-nlp")["metadata"]["uid"].as_str().unwrap().to_owned();
    let owner = format!(
        ", ownerReferences: [{{apiVersion: aviflow.dev/v1alpha1, kind: TrainingJob, name: to-nlp, uid: {uid}}}]"
    );
    cluster.must("ann", CREATE, &pod("own", ", labels: {app: a}"));
    cluster.must("plane", CREATE, &pod("worker", label));
    cluster.must("plane", CREATE, &pod("owned", &owner));
    let mut shown = String::new();
    let mut refused = |arguments: &str, input: &str| {
        let said = cluster.kubectl("ann", arguments, input);
        assert!(!said.ok, "{arguments}: {}", said.out);
        shown.push_str(&said.err);
    };
    refused(CREATE, &pod("forged", label));
    refused(CREATE, &pod("forged", &owner));
    refused("-n team label pod own aviflow.dev/job=to-nlp", "");
    refused("-n team label --overwrite pod worker aviflow.dev/job=other", "");
    refused("-n team label pod worker aviflow.dev/job-", "");
    crate::shown::snapshot("pods", &shown);
    // What has nothing to do with jobs is everybody's own.
    cluster.must("ann", "-n team label --overwrite pod worker app=b", "");
    cluster.must("ann", "-n team label pod own app-", "");
}

/// Roles give what they say and no more.
pub fn roles(cluster: &Cluster) {
    let may = |user: &str, what: &str| cluster.kubectl(user, &format!("auth can-i {what}"), "").ok;
    for (user, what, expected) in [
        ("ben", "create trainingjobs.aviflow.dev -n team", true),
        ("ben", "create trainingjobs.aviflow.dev -n default", false),
        ("ben", "patch trainingjobs.aviflow.dev --subresource=status -n team", false),
        ("ben", "list queues.aviflow.dev", true),
        ("ben", "create queues.aviflow.dev", false),
        ("plane", "patch trainingjobs.aviflow.dev --subresource=status -n team", true),
        ("plane", "create pods -n team", true),
        ("plane", "get secrets -n team", false),
        ("plane", "create pods --subresource=exec -n team", false),
        ("plane", "create deployments.apps -n team", false),
        ("plane", "delete nodes", false),
        ("plane", "create clusterrolebindings", false),
    ] {
        assert_eq!(may(user, what), expected, "{user}: {what}");
    }
    // Who may do everything in a namespace may submit there; aggregation needs a controller to be filled in.
    let role = cluster.get("clusterrole aviflow-user");
    for aggregate in ["edit", "admin"] {
        assert_eq!(role["metadata"]["labels"][format!("rbac.authorization.k8s.io/aggregate-to-{aggregate}")], "true");
    }
}
