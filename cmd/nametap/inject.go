package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
)

// controlPlane is the program that has the command inject. With that command, this program, which runs in every pod,
// would be 2 % larger.
const controlPlane = "nametap-discovery"

func newInjectCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "inject -f FILE",
		Short:              "Add the agent to the pods of a manifest",
		DisableFlagParsing: true, // the other program has the flags
		RunE: func(_ *cobra.Command, args []string) error {
			program, err := programBeside(controlPlane)
			if err != nil {
				return fmt.Errorf("the program %s does the work: install it beside nametap or in PATH, or run its image: %w",
					controlPlane, err)
			}
			// The other program replaces this process, so it has the output, the signals and the exit code. Because its
			// first argument is "nametap", it uses this name in its help and its errors.
			return fmt.Errorf("running %s: %w", program,
				syscall.Exec(program, append([]string{"nametap", "inject"}, args...), os.Environ()))
		},
	}
}

// programBeside returns the path of another program, which is in the directory of this program or in PATH.
func programBeside(name string) (string, error) {
	self, err := os.Executable()
	if err == nil {
		path, err := exec.LookPath(filepath.Join(filepath.Dir(self), name))
		if err == nil {
			return path, nil
		}
	}
	path, missing := exec.LookPath(name)
	if missing != nil {
		return "", errors.Join(missing, err)
	}
	return path, nil
}
