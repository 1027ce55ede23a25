// Package inject adds the agent to pods.
//
// Pod is the one function that decides and changes: a pod, its namespace and a Config give the pod with
// nametap in it, and reasons. It reads no file and no cluster. Manifest calls it for each pod of a
// manifest. Pods are YAML trees, so that comments and unknown fields stay; JSON is YAML, too.
//
// The steps of Pod:
//
//  1. decide: whether the pod is to be injected, by labels and what would do harm
//  2. forPod: the settings of this pod, by its annotations and its namespace
//  3. obstacle, and the checks of mode Resolv: whether nametap would work in it
//  4. newEdits: the changes, as a value
//  5. apply: the changes made
//
// The files:
//
//	admission.go   Admit: Pod for the webhook, which takes JSON and returns a JSON patch
//	manifest.go    Manifest: Pod for each pod of a manifest
//	workload.go    where the pods are in the objects of a manifest
//	document.go    a document of a manifest: from text, and back
//	merge.go       a changed text with the lines of the original one
//	inject.go      Pod
//	edits.go       all changes of a pod; applying them
//	additions.go   what others have changed in the additions since, which stays
//	resolv.go      the DNS of a pod in mode Resolv
//	containers.go  the containers and volumes that are added
//	decide.go      whether a pod is to be injected, and what nametap would not work in
//	status.go      the annotation that lists what was added
//	config.go      what is added to pods, and to this pod
//	settings.go    settings of the agent
//	resources.go   what the containers request, and their limits
//	pod.go         the fields of a pod, and of its namespace, that decide
//	json.go        trees of YAML nodes in JSON, and of Kubernetes' types
//	validate.go    trees of YAML texts
//	tree.go        finding and changing parts of a tree
//	names.go       names and numbers that the manifests in deploy/kubernetes have, too
//
// The annotation Status lists what was added and what it replaced. newEdits looks at the pod as it
// was without that, so that the result of a second injection is the same, also after other
// injectors have moved containers. The additions are generated from that and the Config alone. The
// marks of its parts are in the annotation, too, and a part with the same mark stays, whatever
// others have made of it. The author of a pod can write any annotation; it then
// keeps fields that the author can set anyway, and what checks pods comes after.
package inject
