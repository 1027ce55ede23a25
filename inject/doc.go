// Package inject adds the agent to pods.
//
// Pod is the one function that decides and changes: a pod, its namespace and a Config give the pod with
// nametap in it, and reasons. It reads no file and no cluster. Manifest calls it for each pod of a
// manifest. Pods are YAML trees, so that comments and unknown fields stay; JSON is YAML, too.
//
// The steps of Pod:
//
//  1. decide: whether the pod is to be injected, by labels and what would do harm (decide.go)
//  2. obstacle, and the checks of mode Resolv: whether nametap would work in it (pod.go, edits.go)
//  3. newEdits: the changes, as a value (edits.go, containers.go)
//  4. apply: the changes made (apply.go)
//
// The annotation Status lists what was added and what it replaced. newEdits looks at the pod as it was
// without that, so that the result of a second injection is the same, also after other injectors have
// moved containers.
//
// # In a cluster
//
// Admit is Pod for the webhook: it takes JSON, and returns a JSON patch (admission.go).
//
// Policy writes admission policies whose expressions, in CEL, do the same (policy.go, cel.go). The
// containers, volumes and settings in them come from the functions of newEdits, called for each kind of pod
// on which they depend. Decisions, refusals, the DNS of mode Resolv and Istio's variables are written a second
// time; test/machines/interop compares both for many pods. What is peculiar:
//
//   - decide is a variable and not a list of matchConditions, which do not know the namespace's labels.
//   - Lists are replaced as a whole, and values are dyn, because literals of maps in Kubernetes' CEL must not
//     mix types.
//   - A variable of Istio's containers is replaced at its index, after the list of init containers was.
//   - A mutating policy cannot reject a pod. It leaves what Pod refuses as it is, and the validating policy
//     rejects that.
//   - The API server sets defaults before it asks for admission, such as dnsPolicy: ClusterFirst. The
//     annotation then says that the pod had this policy.
package inject
