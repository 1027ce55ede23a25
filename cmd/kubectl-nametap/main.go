// Command kubectl-nametap is a plugin of kubectl. It runs the commands of nametap in a pod, commands of nametap-discovery in
// all of its replicas, and shows all agents of a cluster:
//
//	kubectl nametap status web-0 -n shop
//	kubectl nametap agents --stale
//	kubectl nametap fleet --output html >fleet.html
//
// It runs the programs in the pods with `kubectl exec`. So the pods need no shell, and the programs have the version of the
// agent. Most of their output comes from a unix socket, which `kubectl port-forward` does not reach. The fleet is read through
// `kubectl proxy`, from the port that also Prometheus reads.
//
// The files, in the order in which to read them: main.go, fleet.go (the command fleet), agent.go (what is known of an agent, and
// how it is read), cluster.go (the API server).
package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
)

const usage = `Run commands of nametap in a pod, and commands of nametap-discovery in all replicas.

Usage:
  kubectl nametap status POD      the agent's connection, table, nameservers and capture
  kubectl nametap query POD NAME  an answer, and the rule that gave it
  kubectl nametap table POD       the agent's table
  kubectl nametap cache POD       the agent's cache
  kubectl nametap doctor POD      what is wrong
  kubectl nametap tail POD        the queries that fail, and all others as they are answered
  kubectl nametap top POD         which names, clients or nameservers have most queries
  kubectl nametap explain POD ROW|CODE|WORD...
                                  what the documents of that version say about it
  kubectl nametap version POD     the agent's version
  kubectl nametap agents          the agents of all replicas of nametap-discovery
  kubectl nametap fleet           all agents, with any control plane, and what is wrong with them, as a table or a page:
                                  kubectl nametap fleet --help

POD may also be TYPE/NAME, as for kubectl exec, which takes one pod of it. What follows it is passed to the command in the
pod: kubectl nametap query web-0 -n shop api.example.com AAAA --output json

Flags:
  -n, --namespace NS        the namespace of the pod; with agents and fleet, the namespace of the agents to show. So the
                            number of queries that tail and top show is --count here
  -c, --container NAME      the container of the agent (default nametap)
  --discovery-namespace NS  the namespace of nametap-discovery (default nametap-system)
  --context, --kubeconfig, --cluster, --user, --as, --as-group, --request-timeout: as for kubectl
`

const exitFailed, exitUsage = 1, 2 // exit codes, as nametap has them

// agents is a command of nametap-discovery, and allAgents one of the plugin; all other commands are of nametap.
const agents, allAgents = "agents", "fleet"

func main() { os.Exit(run(os.Args[1:])) }

// run runs a command line and returns the exit code.
func run(args []string) int {
	r, err := parse(args)
	if errors.Is(err, errHelp) {
		fmt.Print(usage)
		return 0
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "kubectl nametap: %v\n`kubectl nametap --help` shows the usage\n", err)
		return exitUsage
	}
	signal.Notify(make(chan os.Signal, 1), os.Interrupt) // kubectl gets the signal, too, and ends
	code := 0
	switch r.command {
	case agents:
		code, err = r.replicas()
	case allAgents:
		code, err = (&fleet{request: r}).run(r.args, os.Stdout)
	default:
		code, err = r.exec(r.pod, r.namespace, append([]string{"nametap", r.command}, r.args...))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "kubectl nametap: %v\n", err)
		return max(code, exitFailed)
	}
	return code
}

// A request is a command line.
type request struct {
	command, pod string
	args         []string // arguments of the command in the pod
	kubectl      []string // flags of kubectl

	namespace, container, discovery string
}

var errHelp = errors.New("help is wanted")

// commands returns the commands of nametap that the plugin runs in a pod of an agent.
func commands() []string {
	return []string{"status", "doctor", "tail", "top", "query", "table", "cache", "explain", "version"}
}

// parse parses a command line.
func parse(args []string) (r request, err error) {
	r.discovery = "nametap-system"
	passed := false // whether further arguments, except for flags of the plugin, are for the command in the pod
	for i := 0; i < len(args); i++ {
		name, value, joined := strings.Cut(args[i], "=")
		if len(name) > 2 && (name[:2] == "-n" || name[:2] == "-c") { // such as -nshop
			name, value, joined = args[i][:2], args[i][2:], true
		}
		to := r.flag(name)
		switch {
		case args[i] == "--":
			r.args = append(r.args, args[i+1:]...)
			return r, r.check()
		case (name == "-h" || name == "--help") && !passed:
			return r, errHelp
		case to != nil:
			if !joined {
				if i++; i == len(args) {
					return r, fmt.Errorf("%s has no value", name)
				}
				value = args[i]
			}
			to(value)
		case passed || strings.HasPrefix(name, "-"):
			passed = true
			r.args = append(r.args, args[i])
		case r.command == "":
			r.command = args[i]
			passed = r.command == agents || r.command == allAgents
		default:
			r.pod, passed = args[i], true
		}
	}
	return r, r.check()
}

// flag returns a function that stores the value of a flag of the plugin; nil if name is no such flag.
func (r *request) flag(name string) func(string) {
	switch name {
	case "-n", "--namespace":
		return func(value string) { r.namespace = value }
	case "-c", "--container":
		return func(value string) { r.container = value }
	case "--discovery-namespace":
		return func(value string) { r.discovery = value }
	case "--context", "--kubeconfig", "--cluster", "--user", "--as", "--as-group", "--request-timeout":
		return func(value string) { r.kubectl = append(r.kubectl, name+"="+value) }
	}
	return nil
}

// check returns an error if the command line is wrong.
func (r *request) check() error {
	switch {
	case r.command == "" && len(r.args) == 0:
		return errHelp
	case !slices.Contains(append(commands(), agents, allAgents), r.command):
		return fmt.Errorf("%q: want %s, %s or %s first", cmp.Or(append([]string{r.command}, r.args...)...), strings.Join(commands(), ", "), agents, allAgents)
	case r.pod == "" && slices.Contains(commands(), r.command):
		return fmt.Errorf("no pod is named: want it before flags of nametap: kubectl nametap %s POD", r.command)
	}
	return nil
}

// exec runs a program in a pod, and returns its exit code.
func (r *request) exec(pod, namespace string, program []string) (int, error) {
	container := cmp.Or(r.container, program[0]) // the manifests name each container like its program
	args := slices.Clone(r.kubectl)
	if namespace != "" {
		args = append(args, "--namespace="+namespace)
	}
	args = append(append(args, "exec", pod, "--container="+container, "--"), program...)
	cmd := exec.Command("kubectl", args...) //nolint:noctx // it ends with the interrupt
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err := cmd.Run()
	if ended, ok := errors.AsType[*exec.ExitError](err); ok {
		return max(ended.ExitCode(), exitFailed), nil // ExitCode is -1 after a signal
	}
	return 0, err
}

// replicas runs the command agents in each replica of nametap-discovery. A replica shows the agents that are connected
// to it. If a replica fails, the agents of the other replicas are still shown.
func (r *request) replicas() (int, error) {
	args := append(slices.Clone(r.kubectl), "--namespace="+r.discovery, "get", "pods", "--selector=app=nametap-discovery", "--field-selector=status.phase=Running", "--output=name")
	cmd := exec.Command("kubectl", args...) //nolint:noctx // it ends with the interrupt
	cmd.Stderr = os.Stderr
	list, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("listing the replicas of nametap-discovery: %w", err)
	}
	pods := strings.Fields(string(list))
	if len(pods) == 0 {
		return 0, fmt.Errorf("no pod with the label app=nametap-discovery runs in the namespace %s: --discovery-namespace names another one", r.discovery)
	}
	program := []string{"nametap-discovery", agents}
	if r.namespace != "" {
		program = append(program, "--namespace="+r.namespace)
	}
	code := 0
	for _, pod := range pods {
		one, err := r.exec(pod, r.discovery, append(program, r.args...))
		if err != nil {
			return 0, err
		}
		if one != 0 {
			_, _ = io.WriteString(os.Stderr, "kubectl nametap: the agents of "+pod+" are not shown, or not all of them\n")
			code = one
		}
	}
	return code, nil
}
