// Package inject adds the agent to pods.
//
// Only the function Pod decides about a pod and changes it. It takes a pod, its namespace and a Config, and returns the
// changed pod and the reasons for its decision. Pod reads no file and no cluster. Manifest calls Pod for each pod of a
// manifest. Pods are maps and lists, as in JSON, so unknown fields stay.
//
// The steps of Pod:
//
//  1. decide says whether the pod is to be injected, by its labels, its namespace, and fields such as hostNetwork, with
//     which injection would do harm.
//  2. forPod returns the settings of this pod, by its annotations and its namespace.
//  3. obstacle, and the checks of mode Resolv, say whether nametap would work in the pod.
//  4. newEdits returns the changes, as a value.
//  5. apply makes the changes.
//
// The files:
//
//	manifest.go    Manifest: Pod for each pod of a manifest
//	workload.go    where the pods are in the objects of a manifest
//	document.go    a document of a manifest: from text, which is read as kubectl reads it, and back
//	inject.go      Pod, and Admit: Pod for the webhook, which takes JSON and returns a JSON patch
//	edits.go       all changes of a pod; applying them; the annotation that lists what was added
//	additions.go   keeping the changes that others have made in the additions
//	resolv.go      the DNS of a pod in mode Resolv
//	containers.go  the containers and volumes that are added
//	decide.go      whether a pod is to be injected, and in which pods nametap would not work
//	config.go      the settings of injection, for all pods and for one, and the annotations that replace them
//	settings.go    settings of the agent
//	resources.go   the requests and limits of the containers
//	guard.go       the ConfigMap with the policy of a guard, and pods that would get around it
//	pod.go         the fields of a pod, and of its namespace, that decide
//	names.go       names and numbers that deploy/kubernetes/istiod.yaml has, too
//
// The annotation Status lists the additions and what they replaced. newEdits looks at the pod without the additions, so
// a second injection has the same result, even after other injectors have moved containers. The annotation also has a
// mark, a short hash, for each part of an addition as injection has generated it. If the next injection generates a part
// with the same mark, the part of the pod stays, whatever others have changed in it. Any annotation is harmless: it can
// only keep fields that the author of the pod can set anyway, and other admission controllers check the pod afterwards.
package inject
