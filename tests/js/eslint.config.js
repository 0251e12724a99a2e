import js from '@eslint/js';

export default [
  js.configs.recommended,
  {
    rules: {
      // tsc finds undeclared and unused names.
      'no-undef': 'off',
      'no-unused-vars': 'off',
      // Control characters are what `clean` replaces.
      'no-control-regex': 'off',
      'consistent-return': 'error',
      curly: ['error', 'multi-line'],
      eqeqeq: ['error', 'always', {null: 'ignore'}],
      'max-lines': ['error', 400],
      'no-shadow': 'error',
      'no-var': 'error',
      'prefer-const': 'error',
    },
  },
];
