package vm_test

import (
	"os"
	"testing"

	"github.com/nametap/nametap/test/machines/vm"
)

func TestMain(m *testing.M) { os.Exit(vm.Main(m)) }
