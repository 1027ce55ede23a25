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
// The annotation Status lists what was added and what it replaced. newEdits looks at the pod as it
// was without that, so that the result of a second injection is the same, also after other
// injectors have moved containers. The additions are generated from that and the Config alone. The
// marks of its parts are in the annotation, too, and a part with the same mark stays, whatever
// others have made of it (additions.go). The author of a pod can write any annotation; it then
// keeps fields that the author can set anyway, and what checks pods comes after.
//
// Admit is Pod for the webhook: it takes JSON, and returns a JSON patch (admission.go).
package inject
